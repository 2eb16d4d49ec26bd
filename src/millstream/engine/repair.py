"""Changes that lack a value nobody sent, completed by reading their rows at the source once more.

A change leaves out values that it did not change and that are stored apart. If neither its batch nor the target
has them, the source's row has: unless that was changed again since. So a row is taken only if everything else in
it is what the change says. Otherwise another change of the row is on its way, which brings the rest or is
completed itself, and nothing is lost by waiting for it.

A row that was written by the transaction of the change is the change's. Any other may be a later state of its row: then
another change is on its way, and the mirror is early with a value. Or it is another row, which came to the key after
the one that was changed had left it. Then changes are on their way that take the key from the one and give it to the
other, and put right what is there. Until these have come, that is up to the position at which the row was read, the
change is *in doubt*, and no value of it goes along to another key: see `targets.rejects`.

A change that lacks what filters or transforms need (`unsent`) is the source's own: it is completed before they get it.
One that they have shaped is not, and cannot be compared with the source's row: the source's own is asked for instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.changelog import METADATA, exposed
from millstream.engine.witness import Asked, Witness
from millstream.errors import MillstreamError
from millstream.latest import (
    Bools,
    booleans,
    special_maps,
    special_texts,
    unsent_masks,
    whole,
    whole_numbers,
)
from millstream.model import Op, Relation, SourceSpec, StreamSpec
from millstream.sources import read_keys
from millstream.sources.decoders import decoder
from millstream.state.base import UNSENT
from millstream.targets.lanes.copy_text import value_text
from millstream.targets.rejects import Held, Reject, packed_apart, position_of, unpacked_together
from millstream.transforms.compiled import chosen
from millstream.wire.json_columns import json_text

_UNCHANGED, _SPECIAL = "_ms_unchanged", "_ms_special"
_WRITER = "_ms_txid"

LACKS = "it leaves out values that did not change, which the target does not have"


@dataclass(frozen=True)
class Repair:
    """What became of changes without a base."""

    repaired: Mapping[str, bytes]
    """By event id the completed changes, as IPC streams."""
    left: tuple[Reject, ...]
    """The others, with the reason."""
    unasked: frozenset[str] = frozenset()
    """Those of them that the source could not be asked for: of the rest it has another row by now, or none."""
    doubts: tuple[Held, ...] = ()
    """What is in doubt of those that were completed, for a mirror,"""
    lasting: tuple[Held, ...] = ()
    """and what of it still is when their transactions have been delivered."""


@dataclass(frozen=True)
class _Claim:
    """A change that the source's row completes, if that is the one that it wrote."""

    reject: Reject
    completed: bytes
    key: str
    unsent: frozenset[str]
    own: bool
    """Whether its transaction has written the row as it is."""
    until: int
    """Until when it may be told otherwise. What else its own transaction did to the key comes in the same batch."""

    def doubt(self) -> Held:
        return Held(self.reject.event_id, self.reject.seq, self.reject.table, self.reject.key, self.until)

    def asked(self) -> Asked:
        return Asked(self.reject.event_id, self.reject.seq, self.key, self.unsent, self.until)


def repair(stream: StreamSpec, rejects: Sequence[Reject], witness: Witness | None = None) -> Repair:
    """Complete what can be completed. Never raises for a source that cannot be asked: the changes are left then.

    With a `witness`, for a target that keeps what it was once given, nothing is left in doubt.
    """
    sound: list[_Claim] = []
    left: list[Reject] = []
    unasked: set[str] = set()
    groups: dict[str, tuple[Relation, list[Reject]]] = {}
    for relation, some in _described(rejects):
        if some[0].kind != UNSENT and chosen(stream.shape, relation):
            why = "and the stream changes rows on their way, so that the source's would not do"
            left += [_because(one, why) for one in some]
            unasked.update(one.event_id for one in some)
            continue
        groups.setdefault(relation.fingerprint(), (relation, []))[1].extend(some)
    for relation, group in groups.values():
        changes = unpacked_together([one.row for one in group]).combine_chunks()
        try:
            rows, until = _read(stream.source, relation, changes)
        except MillstreamError as failed:
            left += [_because(one, f"the source cannot be asked for them ({type(failed).__name__})") for one in group]
            unasked.update(one.event_id for one in group)
            continue
        claims, other = _claimed(group, changes, rows, _key(exposed(relation)), until)
        sure = None if witness is None else witness.unmoved(relation, [one.asked() for one in claims])
        for claim in claims:
            if sure is None or claim.reject.event_id in sure:
                sound.append(claim)
            else:
                other.append(_because(claim.reject, "and it is not certain that the source's row is still the same"))
        left += sorted(other, key=lambda one: one.seq)
    doubted = sound if witness is None else ()
    doubts, lasting = (tuple(one.doubt() for one in doubted if every or not one.own) for every in (True, False))
    repaired = {one.reject.event_id: one.completed for one in sound}
    return Repair(repaired, tuple(left), frozenset(unasked), doubts, lasting)


def _claimed(
    group: Sequence[Reject], changes: pa.Table, rows: pa.Table, key: Sequence[str], until: int
) -> tuple[list[_Claim], list[Reject]]:
    """Which changes the rows complete, which were read up to that position; and the others, with the reason."""
    texts = _key_texts(changes, key)
    places = pc.index_in(texts, value_set=_key_texts(rows, key))
    there = np.flatnonzero(booleans(places.is_valid()))
    mine, found = changes.take(whole_numbers(there)), rows.take(places.drop_null())
    own = pc.equal(whole(mine["_ms_txid"]), whole(found[_WRITER])).to_pylist()
    positions, unsent = mine["_ms_position"].to_pylist(), mine[_UNCHANGED].to_pylist()
    claims = [
        _Claim(
            group[at],
            row,
            texts[at].as_py(),
            frozenset(unsent[number]),
            own[number],
            position_of(positions[number]) + 1 if own[number] else until,
        )
        for number, (at, row) in enumerate(zip(there.tolist(), _completed(mine, found), strict=True))
        if row is not None
    ]
    gone = "and the source no longer has the row under this key"
    changed = "and the source has changed the row since"
    done, here = {one.reject.event_id for one in claims}, set(there.tolist())
    return claims, [
        _because(one, changed if at in here else gone) for at, one in enumerate(group) if one.event_id not in done
    ]


def _described(rejects: Sequence[Reject]) -> Iterator[tuple[Relation, list[Reject]]]:
    """The changes of each relation, of one kind, with what it is: to read that for each of them takes long."""
    groups: dict[tuple[str, int, str], list[Reject]] = {}
    for one in rejects:
        groups.setdefault((one.table, one.relation_id, one.kind), []).append(one)
    for some in groups.values():
        yield Relation.from_json(some[0].relation), some


def _because(one: Reject, why: str) -> Reject:
    said = one.reason if one.kind == UNSENT else f"{one.table}: {LACKS}"
    return replace(one, reason=f"{said}, {why}")


def _key(seen: Relation) -> tuple[str, ...]:
    return seen.primary_key if seen.identity == "f" else seen.key


def _key_texts(rows: pa.Table, key: Sequence[str]) -> pa.StringArray:
    return pc.binary_join_element_wise(*(json_text(whole(rows[name])) for name in key), ",")


def _read(source: SourceSpec, relation: Relation, changes: pa.Table) -> tuple[pa.Table, int]:
    """The source's rows under the keys that changed ones have, with `_ms_special`, and who wrote them in `_ms_txid`.

    And the position before which all was committed that they show.
    """
    seen = exposed(relation)
    key = _key(seen)
    places = [[column.name for column in seen.columns].index(name) for name in key]
    texts = [value_text(whole(changes[name])).to_pylist() for name in key]
    keys = sorted(set(zip(*texts, strict=True)))
    txids = sorted(set(changes["_ms_txid"].to_pylist()))
    read = read_keys(source, relation, [relation.columns[at].name for at in places], keys, txids)
    decoded = decoder(seen).decode(np.full(len(read.payload), Op.READ, np.uint8), read.payload)
    rows = pa.Table.from_batches([decoded.after]).append_column(_SPECIAL, decoded.special)
    return rows.append_column(_WRITER, pa.array(read.writers, pa.int64())), read.until


def _completed(changes: pa.Table, rows: pa.Table) -> list[bytes | None]:
    """Each change with every value; None if the row, which is at the same place, is not the one that it wrote."""
    unsent = unsent_masks(whole(changes[_UNCHANGED]))
    ours, theirs = special_texts(changes), special_texts(rows)
    same, nowhere = np.ones(changes.num_rows, bool), np.zeros(changes.num_rows, bool)
    none = pa.nulls(changes.num_rows, pa.string())
    for name in changes.column_names:
        if name in METADATA:
            continue
        given, value = whole(changes[name]), whole(rows[name])
        lacks = unsent.get(name, nowhere)
        sent = whole_numbers(np.flatnonzero(~lacks))
        exact = _alike(ours.get(name, none).take(sent), theirs.get(name, none).take(sent))
        same[~lacks] &= exact & _alike(json_text(given.take(sent)), json_text(value.take(sent)))
        if not lacks.any():
            continue
        order = np.where(lacks, len(given) + np.arange(len(given)), np.arange(len(given)))
        taken = pa.concat_arrays([given, value.cast(given.type)]).take(whole_numbers(order))
        changes = changes.set_column(changes.column_names.index(name), changes.schema.field(name), taken)
        if name in theirs:
            ours[name] = pc.coalesce(_where(lacks, theirs[name]), ours.get(name, none))
    for name, column in ((_UNCHANGED, [[]] * changes.num_rows), (_SPECIAL, special_maps(ours, changes.num_rows))):
        field = changes.schema.field(name)
        cells = column if isinstance(column, pa.Array) else pa.array(column, field.type)
        changes = changes.set_column(changes.column_names.index(name), field, cells)
    return [row if fits else None for row, fits in zip(packed_apart(changes), same.tolist(), strict=True)]


def _alike(ours: pa.StringArray, theirs: pa.StringArray) -> Bools:
    """Where both have the same text, or neither has one."""
    both = pc.fill_null(pc.equal(ours, theirs), False)
    return booleans(pc.or_(both, pc.and_(ours.is_null(), theirs.is_null())))


def _where(mask: Bools, texts: pa.StringArray) -> pa.StringArray:
    """The texts, NULL where the mask does not hold."""
    return texts.take(whole_numbers(np.arange(len(texts)), mask))
