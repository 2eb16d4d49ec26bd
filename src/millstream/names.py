"""What is said of a name that is not there."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

MOST = 10
"""So many names are listed."""


def instead(name: str, known: Iterable[str], *, none: str = "there is none") -> str:
    """The name that may have been meant, else those there are, else `none`: the end of a sentence."""
    there = list(known)
    for near in get_close_matches(name, there):
        # Two names are not alike for being in one schema.
        if get_close_matches(_last(name), [_last(near)]):
            return f"did you mean {near}?"
    return f"it has {', '.join(there[:MOST])}{', ...' if len(there) > MOST else ''}" if there else none


def _last(name: str) -> str:
    return name.rpartition(".")[2]
