"""Changes of a table to changes of what its filters and transforms leave of it.

A filtered table has the rows that meet the filters, and its changes are:

    created, read       if the new row meets them
    updated, inside     an update
    updated, left       a delete; the row may never have been inside, where the old row is not known: then the key
                        is not there, and deleting it changes nothing
    updated, entered    a create, where the old row is known; else an update, which writes the row as well
    updated, outside    nothing, where the old row is known; else a delete, as above
    deleted             a delete, unless the old row is known to have been outside
    truncated           a truncate

The old row is known where the source sends whole old rows (REPLICA IDENTITY FULL); its key alone is enough for
filters that need no more. What cannot be decided, because a value that a filter needs did not change and was not
sent, is an error and never a guess (see `lacking`).

Each change is looked at by itself, so that it does not matter how a batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.changelog import BEFORE, schema
from millstream.errors import MissingBase
from millstream.latest import Bools, one_letter, whole_numbers
from millstream.model import Op, Relation
from millstream.transforms.block import Block, Ints, name_lists, new_rows, old_rows, text_maps, truths
from millstream.transforms.fields import Meets

Codes = npt.NDArray[np.uint8]

_ALWAYS = (Op.READ, Op.MESSAGE)
"""What no choice of operations leaves out."""
WRITTEN = (Op.CREATE, Op.READ, Op.UPDATE)
"""What leaves a row."""


@dataclass(frozen=True)
class Rule:
    """Which changes of a table go on."""

    names: tuple[str, ...]
    """The source's columns,"""
    needs: tuple[str, ...]
    """those that filters look at,"""
    tests: tuple[Meets, ...]
    """(what field filters say of rows)"""
    filters: bool
    """whether rows are told apart at all, here or by SQL,"""
    ops: frozenset[int]
    key: frozenset[str]
    """what an old row has at least,"""
    whole: bool
    """and whether old rows are sent whole."""
    table: str

    def meets(self, block: Block) -> Bools:
        """Which rows meet all filters."""
        mask = np.ones(block.size, bool)
        for test in self.tests:
            mask &= test(block)
        return mask

    @property
    def knows_old(self) -> bool:
        """Whether what is sent of old rows is enough to say whether they were inside."""
        return self.whole or self.key.issuperset(self.needs)


@dataclass(frozen=True)
class Rows:
    """Changes taken apart: the new rows, the old ones, and what says which is which."""

    op: Codes
    new: Block
    old: Block
    has_old: Bools

    def take(self, rows: Ints) -> Rows:
        return Rows(self.op[rows], self.new.take(rows), self.old.take(rows), self.has_old[rows])


def shaped(
    batch: pa.RecordBatch,
    rule: Rule,
    transform: Callable[[Block], Block],
    relation: Relation,
    traced: frozenset[str],
    *,
    of_old: frozenset[str] | None = None,
) -> pa.RecordBatch:
    """The changes of the filtered and transformed table, `relation`, in the order of those they come from.

    `traced` are the columns of `relation` that come from those of `rule.key`. `of_old`: only these columns of old
    rows are transformed, nothing goes on of the others.
    """
    rows = apart(batch, rule)
    check_known(rows, rule)
    batch, rows = going_on(batch, rows, rule, rule.meets(rows.new), rule.meets(rows.old))
    if of_old is not None:
        rows = replace(rows, old=rows.old.only(np.zeros(rows.old.size, bool), of_old))
    rows = reduced(rows, rule.key, rule.whole)
    made = replace(rows, new=transform(rows.new), old=transform(rows.old))
    return together(batch, made, rule.whole and of_old is None, relation, traced)


def going_on(
    batch: pa.RecordBatch, rows: Rows, rule: Rule, new_in: Bools, old_in: Bools
) -> tuple[pa.RecordBatch, Rows]:
    """The changes that are some to the filtered table, by which rows are inside. The batch has their metadata."""
    taken, rows = ongoing(rows, rule, new_in, old_in)
    return batch if len(taken) == batch.num_rows else batch.take(whole_numbers(taken)), rows


def ongoing(rows: Rows, rule: Rule, new_in: Bools, old_in: Bools) -> tuple[Ints, Rows]:
    """The same without metadata: which of the changes go on, and as what."""
    taken = np.arange(len(rows.op))
    if rule.filters:
        taken, rows = settled(rows, rule, new_in, old_in)
    asked = np.isin(rows.op, [*rule.ops, *_ALWAYS])
    if not asked.all():
        taken, rows = taken[asked], rows.take(np.flatnonzero(asked))
    return taken, rows


def apart(batch: pa.RecordBatch, rule: Rule) -> Rows:
    """Changes taken apart; what a new row did not send is taken from the old one, where that has it."""
    names = list(rule.names)
    old, has_old = old_rows(batch, names, BEFORE)
    new = new_rows(batch, names)
    return Rows(one_letter(batch["_ms_op"]), new.filled(old, has_old), old, has_old)


def check_known(rows: Rows, rule: Rule) -> None:
    """Raise MissingBase if a filter needs what a change did not send."""
    lacking, column = unsent(rows, rule)
    if column:
        raise lacks(rule.table, int(lacking.sum()), column, "a filter needs")


def unsent(rows: Rows, rule: Rule) -> tuple[Bools, str]:
    """Which changes did not send what a filter needs, and the column that it is; "" where there is no such change."""
    found, column = np.zeros(len(rows.op), bool), ""
    for name in rule.needs:
        unknown = rows.new.unknown.get(name)
        if unknown is not None and unknown.any():
            found, column = found | unknown, column or name
    return found, column


def lacks(table: str, count: int, column: str, why: str) -> MissingBase:
    """The error for a value that was not sent and is needed."""
    return MissingBase(
        f"{table}: {count} changed rows came without {column}, which {why}: its value is large, did not change, and "
        "was not sent",
        hint=f"ALTER TABLE {table} REPLICA IDENTITY FULL, and begin a new target",
    )


def settled(rows: Rows, rule: Rule, new_in: Bools, old_in: Bools) -> tuple[Ints, Rows]:
    """What the changes are to the filtered table, and which of them those are."""
    op = rows.op.copy()
    update, delete = op == Op.UPDATE, op == Op.DELETE
    outside = (rows.has_old & ~old_in) if rule.knows_old else np.zeros(len(op), bool)
    nothing = np.isin(op, (Op.CREATE, Op.READ)) & ~new_in
    nothing |= outside & (delete | (update & ~new_in))
    op[update & ~new_in] = Op.DELETE
    entered = update & new_in & outside
    op[entered] = Op.CREATE
    taken = np.flatnonzero(~nothing)
    return taken, Rows(op, rows.new, rows.old, rows.has_old & ~entered).take(taken)


def reduced(rows: Rows, key: frozenset[str], whole: bool) -> Rows:
    """The rows with nothing in them that must not be seen: a deleted row is what is known of the old one.

    `key` are the columns that an old row has at least; `whole`: it has all.
    """
    deleted = rows.op == Op.DELETE
    old, has_old = rows.old, rows.has_old
    if not whole:
        old = old.only(np.zeros(old.size, bool), key)
    if not deleted.any():
        return Rows(rows.op, rows.new, old, has_old)
    lacking = deleted & ~has_old
    if lacking.any():
        # Without an old row the key did not change: it is in the new one.
        at = truths(lacking)
        keys = {name: pc.if_else(at, rows.new.values[name], old.values[name]) for name in key}
        old = Block(old.size, {**old.values, **keys}, old.special)
        has_old = has_old | lacking
    gone = truths(deleted)
    values = {name: pc.if_else(gone, old.values[name], array) for name, array in rows.new.values.items()}
    nothing = pa.nulls(old.size, pa.string())
    special = {
        name: pc.if_else(gone, old.special.get(name, nothing), rows.new.special.get(name, nothing))
        for name in {**old.special, **rows.new.special}
    }
    unknown = {name: mask & ~deleted for name, mask in rows.new.unknown.items()}
    return Rows(rows.op, Block(old.size, values, special, unknown), old, has_old)


def together(batch: pa.RecordBatch, rows: Rows, whole: bool, relation: Relation, key: frozenset[str]) -> pa.RecordBatch:
    """Changes of `relation` from its rows, with the metadata of the changes in `batch`."""
    there = np.isin(rows.op, WRITTEN)
    # What a transform adds is not in rows that are not there, nor in old keys.
    new = rows.new.only(there | ((rows.op == Op.DELETE) & whole), key)
    old = rows.old.only(rows.has_old & whole, key)
    wanted = schema(relation)
    own = [column.name for column in relation.columns]
    texts = {**new.special, **{f"{BEFORE}.{name}": text for name, text in old.special.items()}}
    made: dict[str, pa.Array] = {name: new.values[name] for name in own}
    made["_ms_op"] = _letters(rows.op)
    made["_ms_deleted"] = truths(np.isin(rows.op, (Op.DELETE, Op.TRUNCATE)))
    made["_ms_unchanged"] = name_lists(new.unknown, new.size)
    made["_ms_special"] = text_maps(texts, new.size)
    if own:
        inner = [old.values[name] for name in own]
        made[BEFORE] = pa.StructArray.from_arrays(
            inner, fields=list(wanted.field(BEFORE).type), mask=truths(~rows.has_old)
        )
    columns = [made[name] if name in made else batch[name] for name in wanted.names]
    return pa.RecordBatch.from_arrays(columns, schema=wanted)


def _letters(op: Codes) -> pa.StringArray:
    offsets = pa.py_buffer(np.arange(len(op) + 1, dtype=np.int32))
    return pa.StringArray.from_buffers(len(op), offsets, pa.py_buffer(np.ascontiguousarray(op)))
