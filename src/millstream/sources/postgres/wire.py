"""Which tables can be captured in binary form (`wire: binary`), and what to say of those that cannot.

Cells carry their own form, so a journal may hold both: the option can be changed at any time.
"""

from __future__ import annotations

from millstream.errors import SourceHalted
from millstream.model import Relation
from millstream.sources.postgres.connection import TEXT_INSTEAD, UNKNOWN_ENCODING
from millstream.sources.postgres.types import lacks_binary


def refusals(relation: Relation) -> list[str]:
    """Why a table cannot be captured in binary form, column by column; empty when it can."""
    if relation.encoding == UNKNOWN_ENCODING:
        return [f"the text of {relation.table} has no known encoding, since its database is {UNKNOWN_ENCODING}"]
    return [
        f"column {column.name} of {relation.table} is {column.type_name or f'of type {column.type_oid}'}, "
        "which is not among the built-in types that are read in binary form"
        for column in relation.columns
        if lacks_binary(column)
    ]


def check_wire(relation: Relation, wire: str) -> None:
    """Raise SourceHalted if the table's changes would come in a binary form that is not read.

    Asked for each description before a change under it is taken over: nothing of the transaction is in the
    journal then, and all of it comes again, as text, once that is asked for.
    """
    if wire == "binary" and (reasons := refusals(relation)):
        raise SourceHalted(f"wire: binary is not possible: {'; '.join(reasons)}", hint=TEXT_INSTEAD)
