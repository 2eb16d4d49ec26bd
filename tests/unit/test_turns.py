"""Batches and copies of tables take turns at a target."""

from __future__ import annotations

import threading

from millstream.engine.turns import Turns
from tests.fixtures.engines import await_that


def test_whoever_waits_is_next_and_a_row_of_short_steps_keeps_nobody_out() -> None:
    turns, never, order = Turns(), threading.Event(), list[str]()
    waiting = threading.Event()

    def batch() -> None:
        waiting.set()
        with turns.taken(never) as mine:
            order.append(f"batch {mine}")

    with turns.taken(never):
        thread = threading.Thread(target=batch)
        thread.start()
        waiting.wait(60)
        await_that(lambda: len(turns._line) == 2)
    with turns.taken(never):
        order.append("the next step")
    thread.join()
    assert order == ["batch True", "the next step"]


def test_who_shall_stop_waits_no_more_and_may_not_write() -> None:
    turns, never, stopping, said = Turns(), threading.Event(), threading.Event(), list[bool]()

    def batch() -> None:
        with turns.taken(stopping) as mine:
            said.append(mine)

    with turns.taken(never):
        thread = threading.Thread(target=batch)
        thread.start()
        stopping.set()
        thread.join()
    assert said == [False]
    with turns.taken(never) as mine:
        assert mine, "nobody is left in line"
