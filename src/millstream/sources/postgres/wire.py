"""Which tables can be captured in binary form (`wire: binary`), and what to say of those that cannot.

Cells carry their own form, so a journal may hold both: the option can be changed at any time.
"""

from __future__ import annotations

from collections.abc import Mapping

from millstream.errors import SourceHalted
from millstream.model import Column, Relation
from millstream.sources.postgres.connection import TEXT_INSTEAD, UNKNOWN_ENCODING
from millstream.sources.postgres.types import BY_ARRAY_OID, BY_OID

_NAMED = "is the number of an object on the wire and its name in text, which only the catalog of that moment tells"
_UNSENDABLE = "has no binary form: the server itself cannot send it so"
_MEMORY = "is sent as the server's own memory, whose text differs between versions of Postgres"
_INDEX = "lives in indexes alone: no table has a value of it"

NOT_READ: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("regclass", "regtype", "regproc", "regprocedure", "regoper", "regoperator"),
            *("regconfig", "regdictionary", "regnamespace", "regrole", "regcollation"),
        ),
        _NAMED,
    ),
    "aclitem": _UNSENDABLE,
    "gtsvector": _UNSENDABLE,
    "pg_ndistinct": _MEMORY,
    "pg_dependencies": _MEMORY,
    "pg_brin_bloom_summary": _INDEX,
    "pg_brin_minmax_multi_summary": _INDEX,
}
"""Why the other built-in types, and arrays of them, cannot give the same columns in binary form."""

CHAR_SINCE = 160000
CHAR_NOTE = "before Postgres 16, which writes bytes beyond ASCII otherwise, only as text"
"""The text of "char" depends on the server's version, and its bytes do not tell it."""


def refusals(relation: Relation, server_version: int) -> list[str]:
    """Why a table cannot be captured in binary form, column by column; empty when it can.

    `server_version` as libpq counts it: 160010.
    """
    if relation.encoding == UNKNOWN_ENCODING:
        return [f"the text of {relation.table} has no known encoding, since its database is {UNKNOWN_ENCODING}"]
    return [
        f"column {column.name} of {relation.table} is {column.type_name or f'of type {column.type_oid}'}, {reason}"
        for column in relation.columns
        if (reason := refusal(column, server_version)) is not None
    ]


def refusal(column: Column, server_version: int) -> str | None:
    """Why a column's values cannot be captured in binary form; None when they can."""
    entry = BY_OID.get(column.type_oid) or BY_ARRAY_OID.get(column.type_oid)
    if entry is None:
        return "which is not among the built-in types that are read in binary form"
    if entry.becomes.binary is None:
        return f"and {entry.name} {NOT_READ[entry.name]}"
    if entry.name == "char" and server_version < CHAR_SINCE:
        return 'and this server, before Postgres 16, writes a "char" otherwise than its binary form tells'
    return None


def check_wire(relation: Relation, wire: str, server_version: int) -> None:
    """Raise SourceHalted if the table's changes would come in a binary form that is not read.

    Asked for each description before a change under it is taken over: nothing of the transaction is in the
    journal then, and all of it comes again, as text, once that is asked for.
    """
    if wire == "binary" and (reasons := refusals(relation, server_version)):
        raise SourceHalted(f"wire: binary is not possible: {'; '.join(reasons)}", hint=TEXT_INSTEAD)
