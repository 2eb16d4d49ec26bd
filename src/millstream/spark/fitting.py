"""One DataFrame, many versions of a table: which of them fit its columns, and how they are made to.

A DataFrame's columns are fixed when it is made; the table may have had others before and get others
later. By name: what a version does not have is NULL, what the DataFrame does not have is left out. A
column whose type is another one is carried over where every value keeps its exact meaning:

    smallint -> int -> bigint      smallint, int -> double      smallint -> float -> double
    integers -> decimal, decimal -> decimal                     where all digits have room
    integers, decimal, boolean, date -> string                  with the text that the source would give
    date -> timestamp_ntz
    string -> variant                                           JSON; what none can hold goes to _ms_special

Every other change of type is an error, in either mode: there is no value to put there.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.types import StructType

from millstream import changelog
from millstream.changelog import BEFORE, METADATA
from millstream.errors import ConfigError, SchemaChanged
from millstream.journal.format import Slice
from millstream.journal.index import column
from millstream.model import Relation, SeqRange
from millstream.spark.format_options import SchemaChange
from millstream.spark.variants import is_variant, noted, variants
from millstream.wire.envelope import ENVELOPE
from millstream.wire.text import decimal_text

if TYPE_CHECKING:
    from millstream.spark.frames import FramePlan

_SPECIAL = "_ms_special"
_DIGITS = {pa.int16(): 5, pa.int32(): 10, pa.int64(): 19}
_EXACT = {
    (pa.int16(), pa.int32()),
    (pa.int16(), pa.int64()),
    (pa.int32(), pa.int64()),
    (pa.int16(), pa.float32()),
    (pa.int16(), pa.float64()),
    (pa.int32(), pa.float64()),
    (pa.float32(), pa.float64()),
    (pa.bool_(), pa.string()),
    (pa.date32(), pa.string()),
    (pa.date32(), pa.timestamp("us")),
}


def check_schema(schema: StructType, table: str | None) -> pa.Schema:
    """The columns of the DataFrame, as every record batch must have them. Raises ConfigError for impossible ones."""
    wanted = _to_arrow(schema)
    ours = {f.name: f for f in (ENVELOPE if table is None else changelog.COMMON)}
    for field in wanted:
        known = ours.get(field.name)
        if known is not None:
            if not known.type.equals(field.type):
                raise ConfigError(f"column {field.name} is {_name(known.type)}, not {_name(field.type)}")
        elif table is None or (field.name.lower() in METADATA and field.name != BEFORE):
            there = ", ".join(ours)
            raise ConfigError(f"there is no column {field.name}: the columns of our own are {there}")
        elif field.name == BEFORE and not types.is_struct(field.type):
            raise ConfigError(f"column {BEFORE} is a struct, not {_name(field.type)}")
        if not field.nullable and (known is None or known.nullable):
            raise ConfigError(f"column {field.name} can be NULL, whatever the table says", hint="leave NOT NULL out")
    return wanted


def _to_arrow(schema: StructType) -> pa.Schema:
    """By Spark's own function, which also checks what we yield. It wants to hear the time zone, or knows it is UTC."""
    zone: dict[str, Any] = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
    return to_arrow_schema(schema, **zone)


def check_versions(plan: FramePlan, versions: Mapping[int, Relation], slices: Sequence[Slice], span: SeqRange) -> None:
    """Raise SchemaChanged, which names the first change in `span` that the DataFrame cannot carry, if there is one."""
    strict = plan.schema_change is SchemaChange.FAIL
    unfit = {
        id: reason
        for id in {piece.relation for piece in slices}
        if (reason := misfit(versions[id], plan.columns, strict=strict, whole=plan.derived)) is not None
    }
    found = [
        (seq, versions[id], *reason)
        for id, reason in unfit.items()
        if (seq := _first_seq(plan, [piece for piece in slices if piece.relation == id], span)) is not None
    ]
    if not found:
        return
    seq, relation, name, why = min(found, key=lambda one: one[0])
    hint = "load() again has the table's newest columns, .schema() those that you want"
    if strict:
        hint += "; schemaChange=null goes on where values keep their meaning"
    if seq - 1 > span.start:
        hint += f"; endingSeq={seq - 1} reads up to there"
    raise SchemaChanged(f"seq {seq} of {relation.table} has other columns than the DataFrame: {name} {why}", hint=hint)


def _first_seq(plan: FramePlan, slices: Sequence[Slice], span: SeqRange) -> int | None:
    """The first row that these slices really have in the range: they may begin before it."""
    from millstream.spark.frames import open_anew

    for piece in sorted(slices, key=lambda one: one.first_seq):
        rows = open_anew(piece, plan.locations, span)
        if len(rows):
            return int(column(rows, "seq")[0])
    return None


def misfit(relation: Relation, wanted: pa.Schema, *, strict: bool, whole: bool) -> tuple[str, str] | None:
    """The first column that keeps a version from being read as `wanted`, with the reason; None if it can be.

    `strict` refuses every difference; `whole` says that `wanted` is meant to have all of the table's columns.
    """
    have = changelog.schema(relation)
    for name, there, here in _pairs(have, wanted):
        if there is None:
            if strict:
                return name, "is not there"
        elif not (_same(there, here) if strict else _fits(there, here)):
            return name, f"is {_name(there)} there and {_name(here)} in the DataFrame"
    if strict and whole:
        more = [field.name for field in have if field.name not in wanted.names]
        if more:
            return more[0], "is not in the DataFrame"
    return None


def _pairs(have: pa.Schema, wanted: pa.Schema) -> Iterator[tuple[str, pa.DataType | None, pa.DataType]]:
    for field in wanted:
        there = have.field(field.name).type if field.name in have.names else None
        if field.name == BEFORE:
            inner = {f.name: f.type for f in there} if there is not None else {}
            yield from ((f"{BEFORE}.{f.name}", inner.get(f.name), f.type) for f in field.type)
        else:
            yield field.name, there, field.type


def fit(changes: pa.RecordBatch, wanted: pa.Schema) -> pa.RecordBatch:
    """The changes in these columns. Only for what `misfit` has nothing against."""
    if changes.schema.equals(wanted):
        return changes
    odd: Odd = {}
    arrays = [
        _carried(changes[field.name], field.type, field.name, odd)
        if field.name in changes.schema.names
        else pa.nulls(changes.num_rows, field.type)
        for field in wanted
    ]
    if odd and _SPECIAL in wanted.names:
        at = wanted.names.index(_SPECIAL)
        arrays[at] = noted(arrays[at], odd)
    if not arrays:
        return pa.RecordBatch.from_struct_array(pa.Array.from_buffers(pa.struct([]), changes.num_rows, [None]))
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


Odd = dict[str, tuple[list[int], pa.Array]]
"""By label in `_ms_special`, the rows whose text the column cannot hold, and the texts."""


def _carried(array: pa.Array, to: pa.DataType, label: str, odd: Odd) -> pa.Array:
    if array.type.equals(to):
        return array
    if is_variant(to):
        made, unfit = variants(array, to)
        if unfit:
            odd[label] = unfit, array
        return made
    if types.is_struct(to):
        names = [field.name for field in array.type]
        inner = [
            _carried(pc.struct_field(array, names.index(f.name)), f.type, f"{label}.{f.name}", odd)
            if f.name in names
            else pa.nulls(len(array), f.type)
            for f in to
        ]
        return pa.StructArray.from_arrays(inner, fields=list(to), mask=array.is_null())
    if types.is_decimal(array.type) and types.is_string(to):
        return decimal_text(array)
    return array.cast(to)


def _same(have: pa.DataType, want: pa.DataType) -> bool:
    """Whether they are one type to Spark, which has TIME in nanoseconds whatever its precision is, or one by choice."""
    if types.is_list(have) and types.is_list(want):
        return _same(have.value_type, want.value_type)
    if types.is_string(have) and is_variant(want):
        return True
    return bool(have.equals(want) or (types.is_time64(have) and types.is_time64(want)))


def _fits(have: pa.DataType, want: pa.DataType) -> bool:
    """Whether every value of one type has the same meaning in the other."""
    if _same(have, want) or (have, want) in _EXACT:
        return True
    if types.is_decimal(have) and types.is_decimal(want):
        return bool(want.scale >= have.scale and want.precision - want.scale >= have.precision - have.scale)
    if have in _DIGITS:
        return bool(types.is_string(want) or (types.is_decimal(want) and want.precision - want.scale >= _DIGITS[have]))
    return bool(types.is_decimal(have) and types.is_string(want))


def _name(arrow: pa.DataType) -> str:
    """A type as Spark calls it."""
    return str(from_arrow_type(arrow).simpleString())
