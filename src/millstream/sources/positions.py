"""Positions as the people of each kind of database write them."""

from __future__ import annotations

from millstream.errors import ConfigError
from millstream.sources.postgres.lsn import parse_lsn


def parse_position(source_kind: str, text: str) -> int:
    """The position that a text means to a source of this kind. Raises ConfigError when it means none."""
    if source_kind == "scripted" and text.isdigit():
        return int(text)
    if source_kind != "postgres":
        raise ConfigError(
            f"positions of a source of kind {source_kind!r} are not known here",
            hint="use the version of millstream that wrote the journal, or a newer one",
        )
    try:
        return parse_lsn(text)
    except ValueError as wrong:
        raise ConfigError(str(wrong)) from None
