"""Changes that lack a value nobody sent, completed by reading their rows at the source once more.

A change leaves out values that it did not change and that are stored apart. If neither its batch nor the target
has them, the source's row has: unless that was changed again since. So a row is taken only if everything else in
it is what the change says. Otherwise another change of the row is on its way, which brings the rest or is
completed itself, and nothing is lost by waiting for it.

A value that is read may be newer than the change when a later change touched it alone. That one carries the value, and
has a higher version: the mirror is early with it. One case is not told apart: the row's key has changed since, and
another row has come under the old key whose other values are all the same. Then that row's value is taken, and the
change of the key, which leaves the value out as well, carries it along.

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
from millstream.targets.rejects import Reject, packed_apart, unpacked_together
from millstream.transforms.compiled import chosen
from millstream.wire.json_columns import json_text

_UNCHANGED, _SPECIAL = "_ms_unchanged", "_ms_special"

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


def repair(stream: StreamSpec, rejects: Sequence[Reject]) -> Repair:
    """Complete what can be completed. Never raises for a source that cannot be asked: the changes are left then."""
    repaired: dict[str, bytes] = {}
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
            rows = _read(stream.source, relation, changes)
        except MillstreamError as failed:
            left += [_because(one, f"the source cannot be asked for them ({type(failed).__name__})") for one in group]
            unasked.update(one.event_id for one in group)
            continue
        key = _key(exposed(relation))
        places = pc.index_in(_key_texts(changes, key), value_set=_key_texts(rows, key))
        there = np.flatnonzero(booleans(places.is_valid()))
        done = _completed(changes.take(whole_numbers(there)), rows.take(places.drop_null()))
        repaired.update((group[at].event_id, row) for at, row in zip(there, done, strict=True) if row is not None)
        gone = {group[at].event_id for at in np.flatnonzero(booleans(places.is_null()))}
        for one in group:
            if one.event_id in gone:
                left.append(_because(one, "and the source no longer has the row under this key"))
            elif one.event_id not in repaired:
                left.append(_because(one, "and the source has changed the row since"))
    return Repair(repaired, tuple(left), frozenset(unasked))


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


def _read(source: SourceSpec, relation: Relation, changes: pa.Table) -> pa.Table:
    """The source's rows under the keys that changed ones have, and their `_ms_special`."""
    seen = exposed(relation)
    key = _key(seen)
    places = [[column.name for column in seen.columns].index(name) for name in key]
    texts = [value_text(whole(changes[name])).to_pylist() for name in key]
    keys = sorted(set(zip(*texts, strict=True)))
    payload = list(read_keys(source, relation, [relation.columns[at].name for at in places], keys))
    rows = pa.concat_arrays(payload) if payload else pa.array([], pa.large_binary())
    decoded = decoder(seen).decode(np.full(len(rows), Op.READ, np.uint8), rows)
    return pa.Table.from_batches([decoded.after]).append_column(_SPECIAL, decoded.special)


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
