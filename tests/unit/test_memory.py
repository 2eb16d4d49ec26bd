"""What a process asks of the system about its memory."""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
from pathlib import Path

import pytest

from millstream.engine.supervisor import start_process
from millstream.memory import arrow_environment, use_small_pages

_GET_THP_DISABLE = 42


def _asked(before: bool) -> None:
    if before:
        use_small_pages()
    sys.exit(ctypes.CDLL(None).prctl(_GET_THP_DISABLE, 0, 0, 0, 0))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has huge pages to be switched off")
@pytest.mark.parametrize("before", [False, True])
def test_a_process_can_do_without_huge_pages(before: bool) -> None:
    process = multiprocessing.get_context("fork").Process(target=_asked, args=(before,))
    process.start()
    process.join()
    assert process.exitcode == int(before)


def test_capture_starts_with_an_arrow_that_keeps_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MIMALLOC_PURGE_DELAY", raising=False)
    with start_process() as process:
        said = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        process.kill()
    assert b"MIMALLOC_PURGE_DELAY=10000" in said


def test_what_the_user_says_of_arrows_memory_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIMALLOC_PURGE_DELAY", "5")
    assert arrow_environment() == {}
