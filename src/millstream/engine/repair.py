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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from millstream.changelog import METADATA, exposed
from millstream.errors import MillstreamError
from millstream.model import Op, Relation, SourceSpec, StreamSpec
from millstream.sources import read_keys
from millstream.sources.decoders import decoder
from millstream.state.base import UNSENT
from millstream.targets.lanes.copy_text import value_text
from millstream.targets.rejects import Reject, packed, unpacked
from millstream.transforms.compiled import chosen
from millstream.wire.json_columns import json_text

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


@dataclass(frozen=True)
class _Rows:
    """Rows of the source, by the text of their key."""

    after: pa.RecordBatch
    special: pa.MapArray
    numbers: Mapping[str, int]


def repair(stream: StreamSpec, rejects: Sequence[Reject]) -> Repair:
    """Complete what can be completed. Never raises for a source that cannot be asked: the changes are left then."""
    repaired: dict[str, bytes] = {}
    left: list[Reject] = []
    unasked: set[str] = set()
    groups: dict[str, list[Reject]] = {}
    for one in rejects:
        if one.kind != UNSENT and chosen(stream.shape, Relation.from_json(one.relation)):
            left.append(_because(one, "and the stream changes rows on their way, so that the source's would not do"))
            unasked.add(one.event_id)
            continue
        groups.setdefault(Relation.from_json(one.relation).fingerprint(), []).append(one)
    for group in groups.values():
        try:
            rows = _read(stream.source, Relation.from_json(group[0].relation), group)
        except MillstreamError as failed:
            left += [_because(one, f"the source cannot be asked for them ({type(failed).__name__})") for one in group]
            unasked.update(one.event_id for one in group)
            continue
        key = _key(exposed(Relation.from_json(group[0].relation)))
        for one in group:
            number = rows.numbers.get(_key_text(unpacked(one.row), key))
            if number is None:
                left.append(_because(one, "and the source no longer has the row under this key"))
                continue
            completed = _completed(unpacked(one.row), rows, number)
            if completed is None:
                left.append(_because(one, "and the source has changed the row since"))
            else:
                repaired[one.event_id] = packed(completed)
    return Repair(repaired, tuple(left), frozenset(unasked))


def _because(one: Reject, why: str) -> Reject:
    said = one.reason if one.kind == UNSENT else f"{one.table}: {LACKS}"
    return replace(one, reason=f"{said}, {why}")


def _key(seen: Relation) -> tuple[str, ...]:
    return seen.primary_key if seen.identity == "f" else seen.key


def _key_text(rows: pa.Table, key: Sequence[str]) -> str:
    """The key of the first row."""
    return ",".join(json_text(_one(rows[name]))[0].as_py() for name in key)


def _read(source: SourceSpec, relation: Relation, rejects: Sequence[Reject]) -> _Rows:
    seen = exposed(relation)
    key = _key(seen)
    places = [[column.name for column in seen.columns].index(name) for name in key]
    changes = pa.concat_tables([unpacked(one.row) for one in rejects]).combine_chunks()
    texts = [value_text(_one(changes[name])).to_pylist() for name in key]
    keys = sorted(set(zip(*texts, strict=True)))
    payload = list(read_keys(source, relation, [relation.columns[at].name for at in places], keys))
    rows = pa.concat_arrays(payload) if payload else pa.array([], pa.large_binary())
    decoded = decoder(seen).decode(np.full(len(rows), Op.READ, np.uint8), rows)
    found = [",".join(parts) for parts in zip(*(json_text(decoded.after[n]).to_pylist() for n in key), strict=True)]
    return _Rows(decoded.after, decoded.special, {text: number for number, text in enumerate(found)})


def _completed(change: pa.Table, rows: _Rows, number: int) -> pa.Table | None:
    """The change with every value; None if the row is not the one that it wrote."""
    unsent = set(change["_ms_unchanged"][0].as_py())
    theirs = dict(rows.special[number].as_py() or ())
    ours = dict(change["_ms_special"][0].as_py() or ())
    for name in change.column_names:
        if name in METADATA:
            continue
        value = rows.after[name].slice(number, 1)
        if name in unsent:
            place = change.column_names.index(name)
            change = change.set_column(place, change.schema.field(place), value.cast(change.schema.field(place).type))
        elif json_text(_one(change[name])) != json_text(value) or ours.get(name) != theirs.get(name):
            return None
    special = list({**ours, **{name: text for name, text in theirs.items() if name in unsent}}.items())
    for name, cell in (("_ms_unchanged", []), ("_ms_special", special)):
        place = change.column_names.index(name)
        change = change.set_column(place, change.schema.field(place), pa.array([cell], change.schema.field(place).type))
    return change


def _one(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks)
