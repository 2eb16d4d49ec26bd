"""Which columns every update sends: those whose values Postgres never stores outside of their row.

A value that stands outside (TOAST) and did not change is not sent. When a row is longer than about 2 kB, the server
moves the largest of its values out, but none of at most 24 bytes: so much is left in a value's place. A number moves
only when nothing else is left to move and the row still does not fit a page (storage `main`); with a declared precision
that takes hundreds of them in one row.
"""

from __future__ import annotations

from millstream.model import Column
from millstream.sources.postgres.types import NUMERIC_OID, TYPES

_LEFT_BEHIND = 24
_HEADER = 4
"""Bytes before the content of a value of no fixed length."""
_CHARACTER = 4
"""Bytes of a character at most, in any encoding."""

_SMALL = {
    *("bool", "int2", "int4", "int8", "float4", "float8", "money", "uuid", "name", "char"),
    *("date", "time", "timetz", "timestamp", "timestamptz", "interval"),
    *("inet", "cidr", "macaddr", "macaddr8", "point", "line", "lseg", "box", "circle", "int4range", "daterange"),
    *("oid", "xid", "cid", "xid8", "tid", "pg_lsn", "regclass", "regtype", "regproc", "regprocedure", "regoper"),
    *("regoperator", "regconfig", "regdictionary", "regnamespace", "regrole", "regcollation", "aclitem"),
}
"""Types of a fixed length, and those whose longest value is at most 24 bytes."""

_SMALL_OIDS = {entry.oid for entry in TYPES if entry.name in _SMALL}
_BPCHAR, _VARCHAR, _BIT, _VARBIT = 1042, 1043, 1560, 1562


def always_sent(column: Column) -> bool:
    """Whether every update that sends a row sends this column's value, changed or not."""
    if column.type_kind == "e":
        return True
    oid, modifier = column.type_oid, column.type_mod
    if column.type_kind == "d":
        oid, modifier = column.base_type_oid or 0, -1 if column.base_type_mod is None else column.base_type_mod
    if oid in _SMALL_OIDS:
        return True
    if oid == NUMERIC_OID:
        return modifier >= _HEADER
    if oid in (_BPCHAR, _VARCHAR):
        return modifier >= _HEADER and _HEADER + _CHARACTER * (modifier - _HEADER) <= _LEFT_BEHIND
    if oid in (_BIT, _VARBIT):
        # The number of bits stands before them.
        return modifier > 0 and _HEADER + 4 + -(-modifier // 8) <= _LEFT_BEHIND
    return False
