"""Log sequence numbers: 64-bit integers inside, `XXXXXXXX/XXXXXXXX` at the edges."""

from __future__ import annotations

import re

_LSN = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


def parse_lsn(text: str) -> int:
    """The integer of `16/B374D848`. Raises ValueError for anything else."""
    match = _LSN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a log position such as 0/16B3748")
    return int(match[1], 16) << 32 | int(match[2], 16)


def format_lsn(lsn: int) -> str:
    """Fixed width, so that the texts sort as the positions do. Postgres reads it back as it is."""
    if not 0 <= lsn < 1 << 64:
        raise ValueError(f"{lsn} is not a 64-bit log position")
    return f"{lsn >> 32:08X}/{lsn & 0xFFFFFFFF:08X}"
