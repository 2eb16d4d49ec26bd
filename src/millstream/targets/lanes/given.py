"""A few rows on their way into Postgres as the parameter of the statement that uses them.

COPY into a temporary table takes three round trips a table. Rows of a handful of changes go as JSON instead, with the
statement, and the statements of all tables of a batch follow each other without waiting (`postgres`). The server reads
each value by its type's own input function, as COPY does: what it takes, and what it refuses, is the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from pyarrow import types

from millstream.targets.lanes.copy_text import plain_text
from millstream.targets.lanes.database import Values, quoted

MOST_ROWS = 200
MOST_BYTES = 256 << 10
"""More is faster by COPY."""

_BUILT_IN = re.compile(
    r"(boolean|smallint|integer|bigint|real|double precision|numeric|money|text|name|character varying|character|bytea"
    r"|date|time|timestamp|interval|uuid|json|jsonb|inet|cidr|macaddr|macaddr8|xml|bit|bit varying)"
    r"(\([\d,]+\))?( with(out)? time zone)?(\[\])?"
)
"""Types that are known to be read like that. Of a user's own nobody knows what they are made of."""
_JSON = ("json", "jsonb")
"""Of these a string would be a JSON string, and not the value that it is the text of."""


def can_be_given(values: Sequence[Values]) -> bool:
    """Whether these rows are few, and of types that JSON can bring."""
    if len(values[0].array) > MOST_ROWS or sum(each.array.nbytes for each in values) > MOST_BYTES:
        return False
    return all(_BUILT_IN.fullmatch(each.column.type) for each in values)


def as_rows(values: Sequence[Values]) -> str:
    """The rows as a table of a statement, to be read from its first parameter. The same text for the same columns."""
    there = [(quoted(each.column.name), each.column.type) for each in values]
    read = ", ".join(f"{name} {'text' if kind in _JSON else kind}" for name, kind in there)
    taken = ", ".join(f"{name}::{kind} AS {name}" if kind in _JSON else name for name, kind in there)
    return f"(SELECT {taken} FROM json_to_recordset($1) AS given({read}))"


def as_parameter(values: Sequence[Values]) -> str:
    """The rows as JSON. They are few: a call of Arrow's costs more than a row of Python's."""
    names = [each.column.name for each in values]
    rows = zip(*(_cells(each) for each in values), strict=True)
    return json.dumps([dict(zip(names, row, strict=True)) for row in rows], ensure_ascii=False)


def _cells(values: Values) -> list[Any]:
    """The values as JSON has them: as the text that the server reads, or as what has the same text."""
    kind = values.array.type
    plain = values.special is None and not values.column.tight
    as_it_is = plain and (types.is_string(kind) or types.is_integer(kind) or types.is_boolean(kind))
    decimal = plain and types.is_decimal(kind)
    cells: list[Any] = (values.array if as_it_is or decimal else plain_text(values)).to_pylist()
    return [None if cell is None else format(cell, "f") for cell in cells] if decimal else cells
