"""How memory is treated that a process has let go of, by the C library and by Arrow."""

from __future__ import annotations

import contextlib
import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_THP_DISABLE = 41
_LARGEST = 32 << 20
"""The largest piece that the library manages itself; it takes no greater number."""


_ARROW = {"MIMALLOC_PURGE_DELAY": "10000"}
"""Milliseconds; a second by default."""


def arrow_environment() -> dict[str, str]:
    """Variables with which a process is to be started whose Arrow keeps freed memory for ten seconds.

    Batches and stretches of a backlog follow each other at about the second after which Arrow's allocator hands memory
    back, and each page of it would be new to the process again. A variable that the user has set stays as it is.
    """
    return {name: value for name, value in _ARROW.items() if name not in os.environ}


def keep_freed(most: int) -> None:
    """Keep up to so many bytes that were freed for the next use, instead of handing them back at once.

    Numpy's columns come and go by the megabyte. Handed back, each is new to the process the next time, and
    the system clears it page by page: a tenth of the time of decoding. Where the C library is another
    than glibc nothing is changed.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, _LARGEST)
        library.mallopt(_TRIM_THRESHOLD, most)


def use_small_pages() -> None:
    """Let the system give out memory by small pages, for this process and those it forks.

    Arrow and numpy ask for huge ones. Their buffers come and go, and each that is new to the process is cleared as a
    whole, two megabytes for what may be a few kilobytes: a tenth of capture's time. Only Linux has such pages.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_THP_DISABLE, 1, 0, 0, 0)
