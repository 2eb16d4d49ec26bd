"""Ranges of a table's key (`millstream.keyrange`), as the server understands them.

The server reads every constant as a value of its column, and says what is wrong with a text that is no condition.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from psycopg import pq

from millstream.changelog import exposed
from millstream.errors import ConfigError, SourceHalted
from millstream.keyrange import (
    Comparison,
    Condition,
    KeyColumn,
    KeyRange,
    Kind,
    NotARange,
    Operand,
    comparisons,
    parse,
    replaced,
)
from millstream.model import Column, Relation, SourceSpec
from millstream.sources.postgres import catalog
from millstream.sources.postgres.connection import Connection, connect, literal, translated
from millstream.sources.postgres.options import PostgresOptions
from millstream.sources.postgres.patterns import quote
from millstream.sources.postgres.types import column_types

_KINDS: dict[int, tuple[Kind, str]] = {
    20: ("integer", "int8"),
    21: ("integer", "int8"),
    23: ("integer", "int8"),
    25: ("text", "text"),
    1043: ("text", "text"),
    2950: ("uuid", "uuid"),
    1082: ("time", "date"),
    1114: ("time", "timestamp"),
    1184: ("time", "timestamptz"),
}
"""By OID of the column's type how it is compared, and as what the server reads a constant."""

_EXAMPLE = 'compare columns of the key with constants, like "id >= 100 AND id < 200" or "day = \'2026-01-31\'"'
_YEARS = re.compile(r"\d{4}-\d\d-\d\d(?!.*BC)")


def key_range(spec: SourceSpec, table: str, where: str) -> KeyRange:
    """The range of a table's key that a text means. Raises ConfigError for what is none, and SourceError."""
    options = PostgresOptions.of(spec)
    with connect(spec, options) as control:
        relation = _described(control, spec, options, table)
        condition = _parsed(control, relation, where)
        columns = _columns(relation, condition)
        return KeyRange(_read(control, relation, condition, columns), tuple(columns.values()))


def source_condition(within: KeyRange) -> str:
    """The range as the source's SQL says it."""

    def operand(column: KeyColumn) -> Operand:
        own = quote(column.source)
        if column.kind != "text":
            return Operand(own, textual=False)
        return Operand(f'{own} COLLATE "C"', indexed=own)

    return within.sql(operand)


def _described(control: Connection, spec: SourceSpec, options: PostgresOptions, table: str) -> Relation:
    oids = [one.oid for one in catalog.relations(control, spec.tables) if one.table == table]
    found = [one.relation for one in catalog.tables_by_oid(control, oids, options.publications)] if oids else []
    if not found:
        raise SourceHalted(f"the source has no table {table}")
    return replace(found[0], types=options.types.chosen)


def _parsed(control: Connection, relation: Relation, where: str) -> Condition:
    try:
        return parse(where)
    except NotARange as wrong:
        # Where the server does not understand it either, it says it better.
        asked = f"EXPLAIN SELECT 1 FROM {quote(relation.schema, relation.name)} WHERE ({where}\n)"
        with translated("asking the server about a condition"):
            answer = control.pgconn.exec_params(asked.encode(), None)
        if answer.status == pq.ExecStatus.FATAL_ERROR:
            said = (answer.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode()
            raise ConfigError(f"where, for {relation.table}: the server says: {said}", hint=_EXAMPLE) from None
        raise ConfigError(
            f"where, for {relation.table}: {wrong}; such a condition could not be answered alike at source and target",
            hint=_EXAMPLE,
        ) from None


def _columns(relation: Relation, condition: Condition) -> dict[str, KeyColumn]:
    """The columns that a condition is about. Raises ConfigError for one that it cannot be about."""
    key = relation.primary_key if relation.identity == "f" else relation.key
    if not key:
        raise ConfigError(
            f"{relation.table} has no key, so that no part of it can be told", hint="reload it without where"
        )
    asked = {one.column for one in comparisons(condition)}
    columns = {column.name: column for column in relation.columns}
    for name in sorted(asked - {*key}):
        what = "is no column of its key" if name in columns else "is no column of it"
        raise ConfigError(
            f"where, for {relation.table}: {name} {what}; rows that are gone from the source are told by the key alone",
            hint=f"its key is {', '.join(key)}: {_EXAMPLE}",
        )
    names = {one.name: other.name for one, other in zip(relation.columns, exposed(relation).columns, strict=True)}
    return {name: KeyColumn(name, names[name], _kind(relation, columns[name])) for name in sorted(asked)}


def _kind(relation: Relation, column: Column) -> Kind:
    kind, _ = _KINDS.get(column.type_oid, (None, ""))
    arrow = column_types(relation)[relation.columns.index(column)].arrow
    if kind is None or (kind != "integer" and str(arrow) != "string"):
        raise ConfigError(
            f"where, for {relation.table}: {column.name} is {column.type_name}, which targets may compare otherwise "
            "than the source",
            hint="whole numbers, text, uuid, dates and timestamps can be compared; or reload the table without where",
        )
    return kind


def _read(control: Connection, relation: Relation, condition: Condition, columns: dict[str, KeyColumn]) -> Condition:
    """The condition with constants as the server writes them."""
    types = {column.name: _KINDS[column.type_oid][1] for column in relation.columns if column.name in columns}
    asked = list(dict.fromkeys(comparisons(condition)))
    written = ", ".join(f"{literal(one.value)}::{types[one.column]}::text" for one in asked)
    answer = control.pgconn.exec_params(f"SELECT {written}".encode(), None)
    if answer.status != pq.ExecStatus.TUPLES_OK:
        said = (answer.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode()
        raise ConfigError(f"where, for {relation.table}: the server says: {said}", hint=_EXAMPLE)
    values = {one: (answer.get_value(0, at) or b"").decode() for at, one in enumerate(asked)}
    _check_times(relation, values, columns)
    return replaced(condition, lambda one: replace(one, value=values[one]))


def _check_times(relation: Relation, values: dict[Comparison, str], columns: dict[str, KeyColumn]) -> None:
    odd: Sequence[Comparison] = [
        one for one, text in values.items() if columns[one.column].kind == "time" and not _YEARS.match(text)
    ]
    if odd:
        raise ConfigError(
            f"where, for {relation.table}: {odd[0].column} is compared with {odd[0].value}, and dates can be compared "
            "with those of the years 1 to 9999 only",
            hint="leave this side of the range open",
        )
