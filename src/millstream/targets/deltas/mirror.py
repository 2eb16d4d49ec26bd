"""A Delta table that equals a table of the source: folded changes to one MERGE.

The version of a row (`_ms_seq`) stands beside it, and an older one does nothing. Exact texts of values that
have no home in their column are in `_ms_special`, as in a changelog.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from millstream.changelog import METADATA, exposed
from millstream.errors import MissingBase, TargetRefused
from millstream.latest import SEQ, Bools, Latest, latest, one_letter, special_maps, special_texts, whole, whole_numbers
from millstream.model import Op, Relation
from millstream.observe import counted
from millstream.sources.decoders import decoded_schema
from millstream.targets.deltas.evolving import described
from millstream.targets.deltas.partitions import refuse_homeless_keys
from millstream.targets.deltas.tables import Handle, lake_schema
from millstream.targets.lanes.tables import SPECIAL, mirror_key

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    from deltalake import CommitProperties

_GONE = "_ms_gone"
_PLACE = "_ms_place"
_ROW = "_ms_row"


def mirror_schema(relation: Relation, *, soft: bool) -> pa.Schema:
    """The columns of a mirror: the source's, the version, and `_ms_deleted` where deleted rows stay."""
    own = [pa.field(SEQ, pa.int64()), *([pa.field("_ms_deleted", pa.bool_())] if soft else [])]
    columns = described(decoded_schema(exposed(relation)), relation, mirror=True)
    return pa.schema([*columns, *own, pa.field(SPECIAL, pa.map_(pa.string(), pa.string()))])


def write_mirror(table: Handle, relation: Relation, changes: pa.Table, said: CommitProperties, *, soft: bool) -> None:
    """Write changes of one relation, which are in seq order. `said` goes with the last commit of them."""
    key = mirror_key(relation)
    if not key:
        _append(table, relation, changes, said, soft)
        return
    found = latest(changes, key)
    if found.missing:
        raise missing_values(relation, found.missing)
    merge_latest(table, relation, found, key, said, soft=soft)


def merge_latest(
    table: Handle, relation: Relation, found: Latest, key: tuple[str, ...], said: CommitProperties, *, soft: bool
) -> None:
    """One commit with what is gone and with the rows, unless the table has newer ones."""
    rows = completed(table, relation, found, key, mirror_schema(relation, soft=False).names)
    refuse_homeless_keys(relation.table, rows, table.partitions(), key)
    if found.truncated is not None:
        table.remove_older(found.truncated, soft=soft)
    wanted = lake_schema(mirror_schema(relation, soft=False))
    living = rows.cast(wanted).append_column(_GONE, pa.repeat(pa.scalar(False), rows.num_rows))
    gone = found.gone.append_column(_GONE, pa.repeat(pa.scalar(True), found.gone.num_rows))
    source = pa.concat_tables([living, widened(gone, living.schema)])
    if not source.num_rows:
        table.append(lake_schema(mirror_schema(relation, soft=soft)).empty_table(), said)
        return
    on = " AND ".join(f"s.{quoted(name)} = t.{quoted(name)}" for name in key)
    values = {quoted(name): f"s.{quoted(name)}" for name in wanted.names}
    alive = values | ({"_ms_deleted": "false"} if soft else {})
    newer = "s._ms_seq > t._ms_seq"
    steps = {"update": (alive, f"NOT s.{_GONE} AND {newer}"), "insert": (alive, f"NOT s.{_GONE}")}
    if soft:
        steps["mark"] = ({"_ms_deleted": "true", "_ms_seq": "s._ms_seq"}, f"s.{_GONE} AND {newer}")
    table.merge(source, on, steps, None if soft else f"s.{_GONE} AND {newer}", said)


def rows_to_write(table: Handle, relation: Relation, changes: pa.Table, *, soft: bool) -> pa.Table:
    """The rows that changes leave, as the table is to hold them; in their order."""
    key = mirror_key(relation)
    wanted = mirror_schema(relation, soft=soft)
    if key:
        rows = completed(table, relation, latest(changes, key), key, mirror_schema(relation, soft=False).names)
    else:
        rows = changes.filter(pc.is_in(changes["_ms_op"], pa.array(["c", "r"])))
    return mirrored(rows, wanted).cast(lake_schema(wanted)).sort_by(SEQ)


def mirrored(rows: pa.Table, wanted: pa.Schema) -> pa.Table:
    """Rows that are there, as a mirror has them."""
    columns = [
        pa.repeat(pa.scalar(False), rows.num_rows) if name == "_ms_deleted" else rows[name] for name in wanted.names
    ]
    return pa.table(columns, schema=wanted)


def has_newer(table: Handle, relation: Relation, change: pa.Table) -> bool:
    """Whether the table has the row of a single change, in one of its versions, as new as the change or newer."""
    key = mirror_key(relation)
    if not key or one_letter(whole(change["_ms_op"]))[0] == Op.TRUNCATE:
        return False
    found = latest(change, key)
    rows = found.rows if found.rows.num_rows else found.gone
    there = rows_under(table, rows.select(list(key)), key, [SEQ])
    return bool(there.num_rows) and pc.max(there[SEQ]).as_py() >= rows[SEQ][0].as_py()


def refuse_keyless(relation: Relation, changes: pa.Table) -> None:
    """Raise TargetRefused for changes of rows that cannot be found."""
    if np.isin(one_letter(whole(changes["_ms_op"])), (Op.UPDATE, Op.DELETE)).any():
        raise TargetRefused(
            f"{relation.table} has no key, so that its updates and deletes cannot be mirrored",
            hint="give the table a primary key, or write: changelog to this target",
        )


def _append(table: Handle, relation: Relation, changes: pa.Table, said: CommitProperties, soft: bool) -> None:
    """A table without a key: rows can only be added, and all of them removed."""
    refuse_keyless(relation, changes)
    op = one_letter(whole(changes["_ms_op"]))
    cut = np.flatnonzero(op == Op.TRUNCATE)
    if len(cut):
        table.remove_older(int(changes[SEQ][int(cut[-1])].as_py()), soft=soft)
        changes = changes.slice(int(cut[-1]) + 1)
    names = [name for name in changes.column_names if name not in METADATA]
    rows = changes.select([*names, SEQ])
    if soft:
        rows = rows.append_column("_ms_deleted", pa.repeat(pa.scalar(False), rows.num_rows))
    rows = rows.append_column(SPECIAL, special_maps(special_texts(changes), rows.num_rows))
    table.append(rows.cast(lake_schema(mirror_schema(relation, soft=soft))), said)


class Incomplete(Protocol):
    """Rows of which the table itself has to say something: see `latest.Latest`."""

    @property
    def rows(self) -> pa.Table: ...

    @property
    def kept(self) -> Mapping[str, Bools]: ...

    @property
    def base(self) -> pa.Table | None: ...

    @property
    def special(self) -> Mapping[str, pa.StringArray]: ...


def completed(
    table: Handle,
    relation: Relation,
    found: Incomplete,
    key: tuple[str, ...],
    order: list[str],
    among: ds.Expression | None = None,
) -> pa.Table:
    """The rows with every value, their columns in `order`.

    What nobody sent is read from the table, under the key the row had before, if `among` holds for the row there.
    """
    rows = found.rows.append_column(SPECIAL, special_maps(found.special, found.rows.num_rows))
    if not found.kept or found.base is None:
        return rows.select(order)
    lacking = np.flatnonzero(reduce(np.logical_or, found.kept.values()))
    held = rows_under(table, found.base.take(whole_numbers(lacking)), key, list(found.kept), among)
    if held.num_rows < len(lacking):
        without = np.setdiff1d(np.arange(len(lacking)), held[_PLACE].to_numpy())
        raise missing_values(relation, found.rows[SEQ].take(whole_numbers(lacking[without])).to_pylist())
    held = held.sort_by(_PLACE)
    special = _merged_special(rows, held, lacking, found.kept)
    for name, mask in found.kept.items():
        kept = mask[lacking]
        values = whole(held[name]).cast(rows.schema.field(name).type)
        taken = _scattered(values.filter(pa.array(kept)), lacking[kept], whole(rows[name]))
        rows = rows.set_column(rows.column_names.index(name), name, taken)
    return rows.set_column(rows.column_names.index(SPECIAL), SPECIAL, special).select(order)


def rows_under(
    table: Handle, base: pa.Table, key: tuple[str, ...], columns: list[str], among: ds.Expression | None = None
) -> pa.Table:
    """For each key its rows in the table for which `among` holds, and which key it was (`_ms_place`).

    The table is read a part at a time, where it may have such keys, and only these rows are kept: it may be larger
    than memory, and a long value of each row would be all of it.
    """
    asked = base.select(list(key)).append_column(_PLACE, whole_numbers(np.arange(base.num_rows)))
    wanted = pa.schema([*(asked.schema.field(name) for name in key), (_ROW, pa.int64())])
    near = _near(asked, key, table.schema())
    if among is not None:
        near = among if near is None else near & among
    found = []
    for some in table.parts([*dict.fromkeys([*key, *columns]), SPECIAL], near):
        keys = some.select(list(key)).append_column(_ROW, whole_numbers(np.arange(some.num_rows))).cast(wanted)
        pairs = asked.join(keys, list(key), join_type="inner")
        found.append(some.take(pairs[_ROW]).append_column(_PLACE, pairs[_PLACE]))
    return pa.concat_tables(found)


def _near(asked: pa.Table, key: tuple[str, ...], there: pa.Schema) -> ds.Expression | None:
    """What holds for all rows under these keys and, where files are of ranges of the key, for few others.

    Of types alone whose bounds Delta keeps for each file in their own order, and not as floating numbers. Texts are not
    among them: a file that has one alone tells it in a form that the condition cannot be compared with.
    """
    ends = []
    for name in key if asked.num_rows else ():
        kind, ours = there.field(name).type, asked.schema.field(name).type
        in_order = types.is_date(kind) or types.is_timestamp(kind)
        if (types.is_integer(kind) and types.is_integer(ours)) or (in_order and kind == ours):
            found = pc.min_max(asked[name].cast(kind))
            ends.append((pc.field(name) >= found["min"]) & (pc.field(name) <= found["max"]))
    return reduce(and_, ends) if ends else None


def _merged_special(rows: pa.Table, held: pa.Table, lacking: np.ndarray, kept: Mapping[str, Bools]) -> pa.Array:
    """Exact texts of the values that were kept come along with them."""
    maps = rows[SPECIAL].to_pylist()
    for at, texts in zip(lacking.tolist(), held[SPECIAL].to_pylist(), strict=True):
        more = [(name, text) for name, text in texts or () if name in kept and kept[name][at]]
        if more:
            maps[at] = [*(maps[at] or ()), *more]
    return pa.array(maps, pa.map_(pa.string(), pa.string()))


def _scattered(values: pa.Array, places: np.ndarray, into: pa.Array) -> pa.Array:
    """`into` with these values at these places."""
    order = np.arange(len(into))
    order[places] = len(into) + np.arange(len(places))
    return pa.concat_arrays([into, values]).take(whole_numbers(order))


def widened(gone: pa.Table, wanted: pa.Schema) -> pa.Table:
    """Keys as rows of which nothing else is known."""
    columns = [
        gone[field.name].cast(field.type) if field.name in gone.column_names else pa.nulls(gone.num_rows, field.type)
        for field in wanted
    ]
    return pa.table(columns, schema=wanted)


def missing_values(relation: Relation, seqs: Sequence[int]) -> MissingBase:
    return MissingBase(
        f"{relation.table}: a value of {counted(len(seqs), 'changed row')} was not sent with the change, and the "
        "target does not have it",
        hint="begin the target with the table's rows (mode: snapshot_then_cdc), or set REPLICA IDENTITY FULL",
        seqs=seqs,
    )


def quoted(name: str) -> str:
    """An identifier in a MERGE."""
    return '"' + name.replace('"', '""') + '"'
