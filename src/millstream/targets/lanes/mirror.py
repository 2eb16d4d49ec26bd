"""A table of the target that equals one of the source: folded changes to statements.

The version of a row (`_ms_seq`) stands beside it; a write with an older version does nothing. With
`deletes: soft` a row that is gone stays, with `_ms_deleted` true.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial, reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import MissingBase, TargetRefused
from millstream.latest import (
    SEQ,
    Bools,
    Ints,
    Latest,
    booleans,
    latest,
    one_letter,
    special_maps,
    special_texts,
    whole,
    whole_numbers,
)
from millstream.model import Op
from millstream.observe import counted
from millstream.targets.lanes.database import ColumnDef, Database, Values, matches, quoted
from millstream.targets.lanes.tables import SPECIAL, Prepared


def write_run(db: Database, prepared: Prepared, changes: pa.Table, *, soft: bool, found: Latest | None = None) -> None:
    """Write changes of one relation, which are in seq order, to its mirror. `found`: they are folded already."""
    if prepared.key:
        Mirror(db, prepared, soft).write(found or latest(changes, prepared.key))
    else:
        _append(db, prepared, changes, soft)


def _append(db: Database, prepared: Prepared, changes: pa.Table, soft: bool) -> None:
    """A table without a key: rows can only be added, and all of them removed."""
    op = one_letter(whole(changes["_ms_op"]))
    if np.isin(op, (Op.UPDATE, Op.DELETE)).any():
        raise TargetRefused(
            f"{prepared.name} has no key, so that its updates and deletes cannot be mirrored",
            hint="give the table a primary key, or write: changelog to this target",
        )
    cut = np.flatnonzero(op == Op.TRUNCATE)
    if len(cut):
        db.remove(partial(Mirror(db, prepared, soft).truncate, int(changes[SEQ][int(cut[-1])].as_py())))
        changes = changes.slice(int(cut[-1]) + 1)
    if changes.num_rows:
        insert_rows(db, prepared, changes, soft=soft)


def clear(db: Database, prepared: Prepared, seq: int, *, soft: bool, only: str = "") -> bool:
    """Remove what is older than a baseline of this version. Returns whether the table is empty then.

    `only` leaves rows alone: the rest of a condition, in SQL.
    """
    db.remove(partial(Mirror(db, prepared, soft).truncate, seq, only))
    return not db.rows(f"SELECT 1 FROM {prepared.table} LIMIT 1")


def has_newer(db: Database, prepared: Prepared, change: pa.Table) -> bool:
    """Whether the table has the row of a single change at its version or a newer one."""
    if not prepared.key or one_letter(whole(change["_ms_op"]))[0] == Op.TRUNCATE:
        return False
    found = latest(change, prepared.key)
    mirror = Mirror(db, prepared, False)
    rows = found.rows if found.rows.num_rows else found.gone
    stage = db.stage(f"asked_{prepared.relation_id}", mirror.keys(rows))
    there = f"{prepared.table} AS t, {stage} AS s WHERE {matches(prepared.key)}"
    return bool(db.rows(f"SELECT 1 FROM {there} AND t._ms_seq >= s.v"))


def insert_rows(db: Database, prepared: Prepared, changes: pa.Table, *, soft: bool) -> None:
    """Add rows that the table does not have: no key has to be looked up for that."""
    own = [name for name in prepared.names if name != SPECIAL]
    found = Latest(None, changes.select([]), changes.select([*own, SEQ]), special=special_texts(changes))
    rows = Mirror(db, prepared, soft).named(found, np.arange(changes.num_rows))
    if soft:
        rows.append(Values(ColumnDef("_ms_deleted", db.boolean), _truths(np.zeros(changes.num_rows, bool))))
    db.insert(prepared.table, rows)


def rewrite(
    db: Database,
    prepared: Prepared,
    stale: pa.Table,
    gone: pa.Table,
    right: Iterable[pa.Table],
    seq: int,
    *,
    soft: bool,
) -> None:
    """Put rows in the place of wrong ones, with the version `seq`: those under the keys `stale` and `gone` count as
    older than anything. `right` are changes of which every row is written."""
    mirror = Mirror(db, prepared, soft)
    for keys, remove in ((stale, False), (gone, True)):
        if keys.num_rows:
            mirror.make_way(keys, remove=remove)
    if gone.num_rows:
        versions = whole_numbers(np.full(gone.num_rows, seq))
        mirror.write(Latest(None, gone.append_column(SEQ, versions), gone.slice(0, 0)))
    for changes in right:
        own = [name for name in prepared.names if name != SPECIAL]
        mirror.write(Latest(None, changes.slice(0, 0), changes.select([*own, SEQ]), special=special_texts(changes)))


class Mirror:
    """What is written to one mirror, as one relation sees it."""

    def __init__(self, db: Database, prepared: Prepared, soft: bool) -> None:
        self._db = db
        self._it = prepared
        self._soft = soft
        self._numbers = [prepared.names.index(name) for name in prepared.key]

    def write(self, found: Latest) -> None:
        """In this order: what is truncated, values that moved rows take along, deletes, rows."""
        if found.missing:
            raise self._missing(found.missing)
        if found.truncated is not None:
            self._db.remove(partial(self.truncate, found.truncated))
        keeping = reduce(np.logical_or, found.kept.values()) if found.kept else np.zeros(found.rows.num_rows, bool)
        kept = self._stage_kept(found, np.flatnonzero(keeping)) if found.kept else None
        if found.gone.num_rows:
            self._db.remove(partial(self._delete, found.gone))
        if kept is not None:
            self._update_in_place(found, kept)
            self._upsert(kept, only="s.m")
        plain = np.flatnonzero(~keeping)
        if len(plain):
            self._upsert(self._db.given(f"rows_{self._it.relation_id}", self._staged(found, plain)), only="true")

    def make_way(self, keys: pa.Table, *, remove: bool) -> None:
        """Let rows under these keys be written anew; with `remove` they stay, to be removed by their version."""
        stage = self._db.stage(f"way_{self._it.relation_id}", self._staged_keys(keys))
        if remove:
            Database.make_way(self._db, self._it.table, self._it.key, stage)
        else:
            self._db.make_way(self._it.table, self._it.key, stage)

    def truncate(self, seq: int, only: str = "") -> None:
        """Remove everything older; with `only` (the rest of a condition, in SQL) what it leaves of that."""
        if self._soft:
            change = f"UPDATE {self._it.table} SET _ms_deleted = true, _ms_seq = {seq}"
            self._db.run(f"{change} WHERE _ms_seq < {seq} AND NOT _ms_deleted{only}")
        else:
            self._db.run(f"DELETE FROM {self._it.table} WHERE _ms_seq < {seq}{only}")

    def keys(self, rows: pa.Table) -> list[Values]:
        """The keys of rows as c0, c1 .. and their version v."""
        return [*self._staged_keys(rows), Values(ColumnDef("v", "bigint"), whole(rows[SEQ]))]

    def _delete(self, gone: pa.Table) -> None:
        it = self._it
        stage = self._db.given(f"gone_{it.relation_id}", self.keys(gone))
        if self._soft:
            self._db.do(
                f"UPDATE {it.table} AS t SET _ms_deleted = true, _ms_seq = s.v FROM {stage} AS s "
                f"WHERE {matches(it.key)} AND t._ms_seq < s.v"
            )
        else:
            self._db.delete(it.table, it.key, stage)

    def _staged_keys(self, keys: pa.Table) -> list[Values]:
        return [
            Values(ColumnDef(f"c{at}", self._it.columns[number].type), whole(keys[name]))
            for at, (name, number) in enumerate(zip(self._it.key, self._numbers, strict=True))
        ]

    def _upsert(self, stage: str, *, only: str) -> None:
        self._db.upsert(self._it.table, self._it.names, self._it.key, stage, soft=self._soft, only=only)

    # Values that nobody sent

    def _stage_kept(self, found: Latest, rows: Ints) -> str:
        """Stage the rows that lack values, with what says which; moved ones get theirs from where they were."""
        it, db = self._it, self._db
        assert found.base is not None  # noqa: S101 - with something kept there is one
        values = self._staged(found, rows)
        for name, mask in found.kept.items():
            flag = ColumnDef(f"k{it.names.index(name)}", db.boolean)
            values.append(Values(flag, _truths(mask[rows])))
        base = found.base.take(whole_numbers(rows))
        for at, (name, number) in enumerate(zip(it.key, self._numbers, strict=True)):
            values.append(Values(ColumnDef(f"b{at}", it.columns[number].type), whole(base[name])))
        values.append(Values(ColumnDef("m", db.boolean), _truths(self._moved(found, base, rows))))
        flags = "_".join(str(it.names.index(name)) for name in found.kept)
        stage = db.stage(f"kept_{it.relation_id}_{flags}", values)
        under_base = matches(it.key, staged="b")
        lacking = db.rows(
            f"SELECT s.v FROM {stage} AS s WHERE NOT EXISTS (SELECT 1 FROM {it.table} AS t WHERE {under_base})"
        )
        if lacking:
            raise self._missing([seq for (seq,) in lacking])
        filled = ", ".join(f"c{number} = {value}" for number, value in self._kept_values(found).items())
        db.run(f"UPDATE {stage} AS s SET {filled} FROM {it.table} AS t WHERE s.m AND {under_base}")
        return stage

    def _kept_values(self, found: Latest) -> dict[int, str]:
        """By number of the column what it becomes where rows keep values."""
        numbers = {name: self._it.names.index(name) for name in found.kept}
        values = {number: _kept(number, name) for name, number in numbers.items()}
        if SPECIAL in self._it.names:
            number = self._it.names.index(SPECIAL)
            values[number] = self._db.kept_special(number, numbers)
        return values

    def _moved(self, found: Latest, base: pa.Table, rows: Ints) -> Bools:
        now = found.rows.take(whole_numbers(rows))
        same = [booleans(whole(pc.equal(base[name], now[name]))) for name in self._it.key]
        moved: Bools = ~np.logical_and.reduce(same)
        return moved

    def _update_in_place(self, found: Latest, stage: str) -> None:
        """Rows that are where they were: what they keep is not even touched."""
        it = self._it
        kept = self._kept_values(found)
        values = [
            f"{quoted(name)} = {kept.get(number, f's.c{number}')}"
            for number, name in enumerate(it.names)
            if name not in it.key
        ]
        values += ["_ms_seq = s.v", *(["_ms_deleted = false"] if self._soft else [])]
        key = matches(it.key, numbers=self._numbers)
        self._db.run(
            f"UPDATE {it.table} AS t SET {', '.join(values)} FROM {stage} AS s "
            f"WHERE NOT s.m AND {key} AND t._ms_seq < s.v"
        )

    def _missing(self, seqs: Sequence[int]) -> MissingBase:
        return MissingBase(
            f"{self._it.name}: a value of {counted(len(seqs), 'changed row')} was not sent with the change, and the "
            "target does not have it",
            hint="begin the target with the table's rows, or set REPLICA IDENTITY FULL on the table",
            seqs=seqs,
        )

    # Rows to columns

    def _staged(self, found: Latest, rows: Ints) -> list[Values]:
        """The rows as c0, c1 .. and their version v."""
        named = self.named(found, rows)
        numbered = [
            Values(replace(values.column, name=f"c{number}"), values.array, values.special, values.of)
            for number, values in enumerate(named[:-1])
        ]
        return [*numbered, Values(ColumnDef("v", "bigint"), named[-1].array)]

    def named(self, found: Latest, rows: Ints) -> list[Values]:
        """The rows under the names of the table's columns, and their version."""
        table = found.rows if len(rows) == found.rows.num_rows else found.rows.take(whole_numbers(rows))
        special = {name: texts.take(whole_numbers(rows)) for name, texts in found.special.items()}
        values = [
            Values(column, whole(table[column.name]), special.get(column.name), f"{self._it.name}.{column.name}")
            for column in self._it.columns
            if column.name != SPECIAL
        ]
        if len(values) < len(self._it.columns):
            values.append(Values(self._it.columns[-1], special_maps(special, len(rows))))
        return [*values, Values(ColumnDef(SEQ, "bigint"), whole(table[SEQ]))]


def _kept(number: int, name: str) -> str:
    """A column's value: the target's where it is kept, else the staged one."""
    return f"CASE WHEN s.k{number} THEN t.{quoted(name)} ELSE s.c{number} END"


def _truths(mask: Bools) -> pa.BooleanArray:
    return pa.Array.from_buffers(pa.bool_(), len(mask), [None, pa.py_buffer(np.packbits(mask, bitorder="little"))])
