"""What a process asks of the system about its memory."""

from __future__ import annotations

import ctypes
import multiprocessing
import sys

import pytest

from millstream.memory import use_small_pages

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
