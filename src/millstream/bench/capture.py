"""From a slot to the journal, streaming or in bulk, against `pg_recvlogical` on a copy of the same slot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from millstream.bench import content, recvlogical
from millstream.bench.frame import BASELINE, OURS, Settings, Taken, alternate, result
from millstream.bench.mix import Part, parts
from millstream.bench.processes import cpu_seconds, spent
from millstream.bench.rig import Backlog, Rig, await_true, await_value, rig
from millstream.engine.capture_order import CaptureOrder
from millstream.engine.supervisor import Supervisor
from millstream.errors import BenchFailed
from millstream.journal import JournalReader
from millstream.model import Json
from millstream.observe import Event

CHANGES = 800_000
MUST = 0.95
MUST_BULK = 2.0
MUST_HELD = 1.0
"""In bulk, while a transaction is open from before the first change until after the last."""
STREAMING = {"catch_up": "streaming"}
BULK = {"catch_up": "auto", "catch_up_behind": "64KiB"}
"""Bulk reading ends at a quarter of that distance: next to nothing is left for the stream."""


def run(settings: Settings) -> Json:
    """The whole mix, streaming or in bulk."""
    mix = parts(settings.rows or CHANGES)
    options = BULK if settings.bulk else STREAMING
    with rig(mix, settings.steps.step, open_transaction=settings.open_transaction) as made:

        def baseline(part: Part) -> Taken:
            return recvlogical.drain(made.of(part), made.directory / "baseline.out")

        def ours(part: Part) -> Taken:
            return drain(made, made.of(part), options)

        rounds = alternate(mix, settings, {BASELINE: baseline, OURS: ours})
    return result(_name(settings), rounds, baseline=recvlogical.NAME, must=_must(settings))


def _name(settings: Settings) -> str:
    return "capture" + " --bulk" * settings.bulk + " --open-transaction" * settings.open_transaction


def _must(settings: Settings) -> float:
    if not settings.bulk:
        return MUST
    return MUST_HELD if settings.open_transaction else MUST_BULK


def drain(made: Rig, backlog: Backlog, options: Mapping[str, str]) -> Taken:
    """Time from capture's connection to the server until the last change is durable and visible in the journal."""
    journal = made.scratch("run") / "journal"
    modes = Modes()
    with backlog.cut_off(journal) as line:
        supervisor = Supervisor(CaptureOrder(backlog.source(**options), journal), modes)
        supervisor.start()
        try:
            # It finds the line cut and waits: from here on nothing of its own start is in the way.
            await_true(lambda: _state(supervisor) == "waiting", "capture is up", seconds=60)
            before = _used(backlog, supervisor)
            began = line.restore()
            ended = _await_end(journal, backlog.goal, supervisor)
            cpu = spent(before, _used(backlog, supervisor))
        finally:
            supervisor.stop()
    return Taken(ended - began, content.journal_equals(journal, backlog), cpu, {"modes": modes.seen})


def _used(backlog: Backlog, supervisor: Supervisor) -> dict[str, float]:
    return {"server": backlog.server_cpu(), "capture": cpu_seconds(supervisor.pid or 0)}


class Modes:
    """Hears in which way the log was read, so that a figure for bulk is one."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_event(self, event: Event) -> None:
        mode = {"source.bulk_started": "bulk", "source.bulk_ended": "streaming", "source.bulk_refused": "refused"}
        if event.kind in mode:
            self.seen.append(mode[event.kind])


def _await_end(journal: Path, goal: int, supervisor: Supervisor) -> float:
    """When the head that shows the last change was published, by the head's own word."""
    reader = JournalReader([str(journal)])

    def published() -> float | None:
        _state(supervisor)
        head = reader.head()
        return head.published_us / 1e6 if head is not None and head.seq >= goal else None

    return await_value(published, "the journal has the last change")


def _state(supervisor: Supervisor) -> str:
    if supervisor.state in ("halted", "stopped"):
        raise supervisor.error or BenchFailed("capture ended by itself")
    return supervisor.state
