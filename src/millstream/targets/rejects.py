"""Changes that a target cannot take: how a task tells them, and what they mean for the changes that follow.

A rejected change becomes a dead letter and is left out of its batch. What it would have done to its row was
not done, so the target's row is older than the source's. Until another change writes that row whole, no value
may be taken from it: a change that relies on one (`_ms_unchanged`) lacks its base, and is rejected too.

A change that was completed by the row that the source has under its key by now is *in doubt*: it may be another row, if
its own went to another key meanwhile. Whatever takes that key from it comes later, and puts right what is there. But
nothing may be taken along to another key: a change that would do so lacks its base as well.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.changelog import BEFORE
from millstream.errors import MissingBase, RowRefused, RowUnshaped, TargetRefused
from millstream.latest import booleans, one_letter, whole_numbers
from millstream.model import Json, Op, Relation
from millstream.observe import counted
from millstream.targets.lanes.tables import mirror_key
from millstream.wire.json_columns import json_text

AT_ONCE = 1000
"""So many rejects leave a task at a time; the rest are found by the next try,"""
BYTES_AT_ONCE = 32 << 20
"""and so many bytes of them."""
LACKING_AT_ONCE = 10_000
"""The same of those that lack values: most of them are completed, and each try reads the whole batch."""

_END_BYTES = 8
"""What stands at the end of an IPC stream."""

EVERY_ROW = "*"
"""As the key of what is in doubt, which no key's JSON text is: any row of the table."""

_MISSING = "it leaves out values that did not change, and the target's row is older than the one they are in"


@dataclass(frozen=True)
class Reject:
    """One change that the target cannot take. `reason` has no value of the row; `key` and `row` have."""

    table: str
    event_id: str
    seq: int
    op: str
    kind: str
    """value | constraint | encoding | missing_base | transform | unsent"""
    reason: str
    key: str | None
    """The key of the row after the change, as JSON text; None where rows have no key."""
    relation_id: int
    relation: Json
    row: bytes
    """The change in the schema of the relation's changelog, as an Arrow IPC stream.

    Of the kinds `transform` and `unsent` relation and change are the source's: nothing was made of them.
    """

    def to_json(self) -> Json:
        return {**vars(self), "row": base64.b64encode(self.row).decode()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Reject:
        return cls(**{**value, "row": base64.b64decode(value["row"])})


class RowsRejected(TargetRefused):
    """Some changes of a batch cannot be taken; nothing was written. The others can be, without them."""

    def __init__(self, rejects: Sequence[Reject]) -> None:
        first = rejects[0]
        super().__init__(f"{first.table}: {counted(len(rejects), 'change')} refused, the first because {first.reason}")
        self.rejects = tuple(rejects)


class Unshapable(TargetRefused):
    """Filters or transforms fail on some changes of a batch; nothing was written. By event id the reasons."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__(
            f"{counted(len(reasons), 'change')} failed to transform, the first because {next(iter(reasons.values()))}"
        )
        self.reasons = dict(reasons)


@dataclass(frozen=True)
class Held:
    """A letter that is open, or a change that is in doubt, as far as tasks must know it; or a table that is."""

    event_id: str
    seq: int
    table: str
    key: str | None
    until: int | None = None
    """None: a letter. Else it is in doubt, by what was committed at the source before this position."""


@dataclass(frozen=True)
class Outstanding:
    """What a batch must know of a target's letters. Picklable, and small: letters are limited."""

    mirrors: bool = False
    """Whether the target keeps the latest row per key; else it appends."""
    held: tuple[Held, ...] = ()
    left_out: frozenset[str] = frozenset()
    """Event ids of changes that are letters."""
    repaired: Mapping[str, bytes] = field(default_factory=dict)
    """By event id the changes that were completed, as IPC streams."""
    unshaped: frozenset[str] = frozenset()
    """Those of `left_out` that filters or transforms fail on: they must not be given to these again."""
    unshapable: Mapping[str, str] = field(default_factory=dict)
    """By event id changes that were found to be such, with the reason: to be told as rejects, with their rows."""
    wanted: frozenset[str] = frozenset()
    """Those of them that nothing fails on, but that the target lacks values for: the source's changes are wanted."""
    completed: Mapping[str, bytes] = field(default_factory=dict)
    """By event id changes of the source that were completed before filters and transforms get them."""
    lacking: frozenset[str] = frozenset()
    """Those of `left_out` that are changes of this very batch, and lack values that nobody has."""


def packed(rows: pa.Table | pa.RecordBatch) -> bytes:
    """Rows as an IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write(rows)
    return bytes(sink.getvalue().to_pybytes())


def unpacked(raw: bytes) -> pa.Table:
    """The rows of an IPC stream."""
    return pa.ipc.open_stream(raw).read_all()


def packed_apart(rows: pa.Table) -> list[bytes]:
    """Each row as an IPC stream of its own. Most of such a stream is its schema, which is told once here."""
    found = []
    for batch in rows.combine_chunks().to_batches():
        sink, ends = pa.BufferOutputStream(), []
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            for at in range(batch.num_rows):
                writer.write_batch(batch.slice(at, 1))
                ends.append(sink.tell())
        raw = bytes(sink.getvalue().to_pybytes())
        begin = _schema_bytes(raw)
        about, end = raw[:begin], raw[-_END_BYTES:]
        found += [about + raw[low:high] + end for low, high in pairwise([begin, *ends])]
    return found


def unpacked_together(raws: Sequence[bytes]) -> pa.Table:
    """The rows of several IPC streams of one schema."""
    begin = _schema_bytes(raws[0])
    if any(raw[:begin] != raws[0][:begin] for raw in raws):
        return pa.concat_tables([unpacked(raw) for raw in raws])
    parts = (raw[begin:-_END_BYTES] for raw in raws)
    return unpacked(b"".join([raws[0][:begin], *parts, raws[0][-_END_BYTES:]]))


def _schema_bytes(raw: bytes) -> int:
    """How long the first message of an IPC stream is, after a mark and its own length: that is the schema."""
    return 8 + int.from_bytes(raw[4:8], "little")


def reject(
    relation: Relation, relation_id: int, row: pa.Table, key: Sequence[str], refused: RowRefused | MissingBase
) -> Reject:
    """A row of a changelog as a reject."""
    (found,) = rejected(relation, relation_id, row, key, refused)
    return found


def rejected(
    relation: Relation, relation_id: int, rows: pa.Table, key: Sequence[str], refused: RowRefused | MissingBase
) -> list[Reject]:
    """Rows of a changelog as rejects: not more of them than leave a task at a time."""
    rows = rows.slice(0, at_once(refused))
    keys = key_texts(rows, key)[0].to_pylist() if key else [None] * rows.num_rows
    names = (rows[name].to_pylist() for name in ("_ms_event_id", "_ms_seq", "_ms_op"))
    described, found, size = relation.to_json(), list[Reject](), 0
    for row, text, event, seq, op in zip(packed_apart(rows), keys, *names, strict=True):
        about = (refused.kind, refused.message, text, relation_id, described, row)
        found.append(Reject(relation.table, event, seq, op, *about))
        size += len(row)
        if size >= BYTES_AT_ONCE:
            break
    return found


def at_once(refused: RowRefused) -> int:
    """How many rejects for this reason leave a task at a time."""
    return LACKING_AT_ONCE if isinstance(refused, MissingBase) else AT_ONCE


def unshaped_reject(
    relation: Relation,
    relation_id: int,
    row: pa.RecordBatch,
    stub: pa.RecordBatch,
    key: Sequence[str],
    why: RowUnshaped,
) -> Reject:
    """A change of the source that cannot be transformed. `stub` has its key as the target has it."""
    found = reject(relation, relation_id, pa.Table.from_batches([row]), (), why)
    return replace(found, key=key_texts(stub, key)[0][0].as_py() if key else None)


def key_texts(rows: pa.Table | pa.RecordBatch, key: Sequence[str]) -> tuple[pa.StringArray, pa.StringArray]:
    """The key of each row after its change and before it, as JSON text; NULL where no old key was sent."""
    before = _one(rows[BEFORE])
    old = {name: pc.struct_field(before, [name]) for name in key}
    there = [pc.coalesce(_one(rows[name]), old[name]) for name in key]
    new_text, old_text = (
        pc.binary_join_element_wise(*(json_text(each) for each in columns), ",") for columns in (there, old.values())
    )
    return new_text, pc.if_else(before.is_valid(), old_text, pa.scalar(None, pa.string()))


def _one(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column


def substituted(batch: pa.RecordBatch, completed: Mapping[str, bytes]) -> pa.RecordBatch:
    """The changes with those that were completed (by event id, as IPC streams) in their places."""
    if not completed:
        return batch
    numbers = {event: number for number, event in enumerate(batch["_ms_event_id"].to_pylist())}
    more = [event for event in completed if event in numbers]
    if not more:
        return batch
    order = np.arange(batch.num_rows)
    rows = unpacked_together([completed[event] for event in more]).combine_chunks().to_batches()
    order[[numbers[event] for event in more]] = batch.num_rows + np.arange(len(more))
    return pa.concat_batches([batch, *rows]).take(whole_numbers(order))


class Guard:
    """Stands between the decoded changes of a batch and its target. One per try of a task."""

    def __init__(self, outstanding: Outstanding) -> None:
        self._it = outstanding
        self.rejects: list[Reject] = []
        """Changes that rely on values of a row that is too old; to be told before anything is committed."""
        self.superseded: dict[str, int] = {}
        """Event ids of letters, and of what was in doubt, that a change of this batch makes obsolete, with its seq."""

    def passed(
        self, relation: Relation, relation_id: int, batches: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """The changes that the target shall get."""
        held = [letter for letter in self._it.held if letter.table == relation.table]
        if not (held or self._it.left_out or self._it.repaired):
            return batches
        key = mirror_key(relation) if self._it.mirrors else ()
        return self._passed(_Concerned(relation, relation_id, key, held, self._it.lacking), batches)

    def check(self) -> None:
        """Raise RowsRejected if a change cannot be taken as it is."""
        if self.rejects:
            raise RowsRejected(self.rejects)

    def _passed(self, it: _Concerned, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            batch = substituted(batch, self._it.repaired)
            pieces, begin = [], 0
            for number, at in it.concerned(batch, self._it.left_out):
                row = batch.slice(number, 1)
                instead = self._instead(it, row, at)
                if len(instead) == 1 and instead[0] is row:
                    continue
                pieces += [batch.slice(begin, number - begin), *instead]
                begin = number + 1
            yield pa.concat_batches([*pieces, batch.slice(begin)]) if pieces else batch

    def _instead(self, it: _Concerned, row: pa.RecordBatch, at: _Place) -> list[pa.RecordBatch]:
        """What goes on of a change. What it makes obsolete, or lacks, is noted."""
        if row["_ms_event_id"][0].as_py() in self._it.left_out:
            if at.old is None or at.old == at.new or row["_ms_op"][0].as_py() != chr(Op.UPDATE):
                return []
            # What the row was called before is free, whatever became of the row.
            self._supersede(self._open(it, {at.old}, at), at.seq)
            return [_as_delete(row)]
        if at.seq < it.lacked_at.get(at.new, 0) and not at.moves and relies_on_its_row(row, 0):
            # The one after it lacks what this one does not have either. Were they told one by one, each would be a try.
            return self._reject(it, row)
        all_rows = row["_ms_op"][0].as_py() == chr(Op.TRUNCATE)
        older = self._open(it, None if all_rows else {at.new, at.old, EVERY_ROW}, at)
        letters = [one for one in older if one.until is None]
        if older and relies_on_its_row(row, 0):
            if letters or (at.moves and any(one.key in (at.old, EVERY_ROW) for one in older)):
                return self._reject(it, row)
            if not at.moves:
                # What it takes from its row is in doubt as before.
                return [row]
        self._supersede([one for one in older if all_rows or one.key != EVERY_ROW], at.seq)
        misleads = letters and not all_rows and it.relation.identity == "f"
        return _afresh(row, at.new, at.old) if misleads else [row]

    def _reject(self, it: _Concerned, row: pa.RecordBatch) -> list[pa.RecordBatch]:
        found = pa.Table.from_batches([row])
        self.rejects.append(reject(it.relation, it.relation_id, found, it.key, MissingBase(_MISSING)))
        return []

    def _supersede(self, older: Sequence[Held], seq: int) -> None:
        for one in older:
            self.superseded[one.event_id] = seq

    def _open(self, it: _Concerned, keys: set[str | None] | None, at: _Place) -> list[Held]:
        """What is open of rows with these keys (None: of all rows) before this change."""
        mine = it.held if keys is None else [one for key in keys for one in it.by_key.get(key, ())]
        return [one for one in mine if one.seq < at.seq and self._is_open(one, at)] if it.key else []

    def _is_open(self, one: Held, at: _Place) -> bool:
        told = one.until is not None and one.until <= at.position
        return not told and self.superseded.get(one.event_id, at.seq) >= at.seq


@dataclass(frozen=True)
class _Place:
    """Where a change stands: its seq, the key of its row after and before it, its position in the source."""

    seq: int
    new: str | None
    old: str | None
    position: int

    @property
    def moves(self) -> bool:
        return self.old is not None and self.old != self.new


@dataclass(frozen=True)
class _Concerned:
    """A relation of the batch, and what is open of its table."""

    relation: Relation
    relation_id: int
    key: tuple[str, ...]
    held: Sequence[Held]
    lacking: frozenset[str]

    @cached_property
    def lacked_at(self) -> Mapping[str | None, int]:
        """By key the last change of this batch that lacks values which nobody has."""
        own = [one for one in self.held if one.event_id in self.lacking and one.key is not None]
        return {one.key: one.seq for one in sorted(own, key=lambda one: one.seq)}

    @cached_property
    def by_key(self) -> Mapping[str | None, Sequence[Held]]:
        found: dict[str | None, list[Held]] = {}
        for one in self.held:
            if one.key is not None:
                found.setdefault(one.key, []).append(one)
        return found

    def concerned(self, batch: pa.RecordBatch, left_out: frozenset[str]) -> Iterator[tuple[int, _Place]]:
        """The rows, by their numbers and in order, that are letters or may touch the row of one."""
        mask = booleans(pc.is_in(batch["_ms_event_id"], pa.array(sorted(left_out), pa.string())))
        if self.held and self.key:
            keys = pa.array(list(self.by_key), pa.string())
            # What is as old as all that is open under its key is not concerned: so are most changes in doubt.
            first = np.array([min(one.seq for one in held) for held in self.by_key.values()])
            seqs = _integers(batch["_ms_seq"], np.int64)
            new_texts, old_texts = key_texts(batch, self.key)
            if EVERY_ROW in self.by_key:
                lacks = pc.greater(pc.list_value_length(batch["_ms_unchanged"]), 0)
                mask |= booleans(pc.fill_null(pc.and_(pc.not_equal(new_texts, old_texts), lacks), False))
            for texts in (new_texts, old_texts):
                places = pc.index_in(texts, value_set=keys)
                at = _integers(pc.fill_null(places, -1), np.int32)
                mask |= (at >= 0) & (seqs > first[at]) if len(first) else False
            mask |= one_letter(batch["_ms_op"]) == Op.TRUNCATE
        if self.lacked_at and self.key:
            mask |= booleans(pc.is_in(key_texts(batch, self.key)[0], pa.array(list(self.lacked_at), pa.string())))
        numbers = np.flatnonzero(mask)
        # All at once: the texts of one row's key take as long as those of thousands.
        rows = batch.take(whole_numbers(numbers))
        texts = [one.to_pylist() for one in key_texts(rows, self.key)] if self.key else [[None] * len(numbers)] * 2
        about = (rows[name].to_pylist() for name in ("_ms_seq", "_ms_position"))
        for number, new, old, seq, position in zip(numbers.tolist(), *texts, *about, strict=True):
            yield number, _Place(seq, new, old, position_of(position))


def _integers(array: pa.Array, kind: type[np.int32] | type[np.int64]) -> npt.NDArray[Any]:
    """A column without NULLs as numpy's."""
    if not len(array):
        return np.zeros(0, kind)
    return np.frombuffer(array.buffers()[1], kind, len(array), array.offset * np.dtype(kind).itemsize)


def position_of(text: str) -> int:
    """The number of `_ms_position`."""
    return int(text.replace("/", ""), 16)


def relies_on_its_row(batch: pa.RecordBatch, at: int) -> bool:
    """Whether the change leaves out values that its own old row does not have either."""
    unsent = batch["_ms_unchanged"][at].as_py()
    if not unsent:
        return False
    before = batch[BEFORE][at].as_py() or {}
    special = dict(batch["_ms_special"][at].as_py() or ())
    return any(before.get(name) is None and f"{BEFORE}.{name}" not in special for name in unsent)


def _afresh(row: pa.RecordBatch, new: str | None, old: str | None) -> list[pa.RecordBatch]:
    """A change that does not tell what it found: that was never written, and whoever looks for it would be misled."""
    if row["_ms_op"][0].as_py() == chr(Op.DELETE):
        return [_as_delete(row)]
    moves = row["_ms_op"][0].as_py() == chr(Op.UPDATE) and old is not None and old != new
    written = _rewritten(row, Op.CREATE, set(row["_ms_unchanged"][0].as_py()))
    return [*([_as_delete(row)] if moves else []), written]


def _as_delete(row: pa.RecordBatch) -> pa.RecordBatch:
    """A delete of the row that the change found."""
    if not row[BEFORE][0].is_valid:
        return row
    return _rewritten(row, Op.DELETE, {inner.name for inner in row.schema.field(BEFORE).type})


def _rewritten(row: pa.RecordBatch, op: Op, from_old: Collection[str]) -> pa.RecordBatch:
    """The change with another operation and without its old row, which some of its values are taken from."""
    before = row[BEFORE]
    special = dict(row["_ms_special"][0].as_py() or ())
    texts = {name: special.get(f"{BEFORE}.{name}" if name in from_old else name) for name in row.schema.names}
    ours: dict[str, Any] = {
        "_ms_op": chr(op),
        "_ms_deleted": op is Op.DELETE,
        BEFORE: None,
        "_ms_unchanged": [],
        "_ms_special": [(name, text) for name, text in texts.items() if text is not None],
    }
    columns = []
    for field_ in row.schema:
        if field_.name in ours:
            columns.append(pa.array([ours[field_.name]], field_.type))
        else:
            columns.append(pc.struct_field(before, [field_.name]) if field_.name in from_old else row[field_.name])
    return pa.RecordBatch.from_arrays(columns, schema=row.schema)
