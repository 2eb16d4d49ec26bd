"""The server's binary form of values (`binary 'true'` of pgoutput) to the same columns that its text gives.

`READERS` names, by `pg_type.typname`, the types whose binary form is read. A reader is given a binary
array of the values as sent and the Arrow type that the column has: the one of the type's entry in
`types`, or a string where the column must be text (a key), which then is the server's text to the letter.
"""

from __future__ import annotations

from collections.abc import Mapping

from millstream.sources.postgres import casts
from millstream.sources.postgres.casts import Reader

READERS: Mapping[str, Reader] = dict.fromkeys(
    ("text", "varchar", "bpchar", "name", "json", "xml", "refcursor"),
    casts.text,
)
"""These are sent as their text in both forms."""
