"""Places in a journal as they are written in commands: a seq, a position of the source, or a time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeVar

from millstream.errors import ConfigError
from millstream.sources.postgres.lsn import parse_lsn

Found = TypeVar("Found")


def at_place(
    text: str, seq: Callable[[int], Found], position: Callable[[int], Found], time: Callable[[int], Found]
) -> Found:
    """What one of these finds by the number that `text` means. Raises ConfigError for what is no place.

    Times are microseconds; one without a zone is meant as the clock on the wall shows it.
    """
    if text.isdecimal():
        return seq(int(text))
    if "/" in text:
        try:
            place = parse_lsn(text)
        except ValueError as wrong:
            raise ConfigError(str(wrong)) from None
        return position(place)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{text!r} is no place in a journal",
            hint="give a seq (1204), a position (0/16B3748) or a time (2026-01-31)",
        ) from None
    return time(int(at.astimezone(UTC).timestamp() * 1_000_000))
