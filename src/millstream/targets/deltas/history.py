"""A Delta table with every version that rows of a table have had: a MERGE ends the old ones and adds the new.

The current version of a key is the one with `is_current`. What is written twice (a batch that comes again) is kept
out by the table's own word on how far it is; see `targets.delta`. A version that would end in the transaction it
began in was never seen: instead of being ended it goes. So changes can be cut anywhere into commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.changelog import END_POSITION, exposed
from millstream.errors import TargetRefused
from millstream.failpoint import failpoint
from millstream.latest import SEQ, one_letter, special_maps, special_texts, whole, whole_numbers
from millstream.model import Op, Relation
from millstream.sources.decoders import decoded_schema
from millstream.targets.deltas.evolving import described
from millstream.targets.deltas.mirror import completed, missing_values, quoted, refuse_keyless, widened
from millstream.targets.deltas.partitions import refuse_homeless_keys
from millstream.targets.deltas.tables import Handle, lake_schema
from millstream.targets.lanes.tables import SPECIAL, mirror_key
from millstream.versions import ADDED, IS_CURRENT, POSITION, VALID_FROM, VALID_TO, Versions, versions

if TYPE_CHECKING:
    from deltalake import CommitProperties

KIND = "_ms_kind"
"""In what is merged: whether a row is a version that is added, or a key whose current version ends."""
VERSION, ENDED = 0, 1
CURRENT = pc.field(IS_CURRENT)
ENDS = {
    # The clock of the source may have been set back: no version ends before it begins.
    VALID_TO: f"CASE WHEN s.{VALID_TO} < t.{VALID_FROM} THEN t.{VALID_FROM} ELSE s.{VALID_TO} END",
    IS_CURRENT: "false",
    END_POSITION: f"s.{END_POSITION}",
}
"""What becomes of a version that ends."""


def history_schema(relation: Relation) -> pa.Schema:
    """The columns: the source's, from when to when a version is valid, by time and by position, and its change."""
    refuse_names(relation)
    own = [
        pa.field(VALID_FROM, pa.timestamp("us", "UTC")),
        pa.field(VALID_TO, pa.timestamp("us", "UTC")),
        pa.field(IS_CURRENT, pa.bool_()),
        pa.field(SEQ, pa.int64()),
        pa.field(POSITION, pa.string()),
        pa.field(END_POSITION, pa.string()),
        pa.field(SPECIAL, pa.map_(pa.string(), pa.string())),
    ]
    return pa.schema([*described(decoded_schema(exposed(relation)), relation, mirror=True), *own])


def refuse_names(relation: Relation) -> None:
    """Raise TargetRefused for a table with a column that is called like one of a history's."""
    taken = [column.name for column in exposed(relation).columns if column.name.lower() in ADDED]
    if taken:
        raise TargetRefused(
            f"{relation.table} has a column {taken[0]}, which write: scd2 has itself",
            hint="rename it in this stream (transforms: rename), or write: changelog",
        )


def write_history(
    table: Handle, relation: Relation, changes: pa.Table, said: Callable[[int], CommitProperties]
) -> None:
    """Write changes of one relation, which are in seq order. Each commit says up to which of them it goes."""
    for piece in pieces(changes):
        seq = int(piece[SEQ][-1].as_py())
        if one_letter(whole(piece["_ms_op"]))[0] == Op.TRUNCATE:
            _end_all(table, piece, said(seq))
            failpoint("delta.history_ended")
        else:
            _merge(table, relation, _found(relation, piece), said(seq))
            failpoint("delta.history_merged")


def past_rows(relation: Relation, rows: pa.Table) -> pa.Table:
    """Rows as versions that begin with them and have not ended: those of a baseline, or of a table without a key."""
    count = rows.num_rows
    more = {
        VALID_FROM: whole(rows["_ms_commit_ts"]),
        VALID_TO: pa.nulls(count, pa.timestamp("us", "UTC")),
        IS_CURRENT: pa.repeat(pa.scalar(True), count),
        END_POSITION: pa.nulls(count, pa.string()),
        SPECIAL: special_maps(special_texts(rows), count),
    }
    wanted = history_schema(relation)
    columns = [more[name] if name in more else rows[name] for name in wanted.names]
    return pa.table(columns, schema=wanted)


def versions_to_write(table: Handle, relation: Relation, changes: pa.Table) -> pa.Table:
    """The versions that changes leave, as the table is to hold them; in their order."""
    wanted = history_schema(relation)
    found = [
        completed(table, relation, one, mirror_key(relation), wanted.names, CURRENT)
        for piece in pieces(changes)
        if one_letter(whole(piece["_ms_op"]))[0] != Op.TRUNCATE
        for one in [_found(relation, piece)]
    ]
    rows = pa.concat_tables(found) if found else wanted.empty_table()
    return rows.cast(lake_schema(wanted)).sort_by(SEQ)


def pieces(changes: pa.Table) -> Iterator[pa.Table]:
    """The changes before, between and behind truncates, and each of these by itself."""
    begin = 0
    for cut in np.flatnonzero(one_letter(whole(changes["_ms_op"])) == Op.TRUNCATE).tolist():
        if cut > begin:
            yield changes.slice(begin, cut - begin)
        yield changes.slice(cut, 1)
        begin = cut + 1
    if begin < changes.num_rows:
        yield changes.slice(begin)


def _found(relation: Relation, changes: pa.Table) -> Versions:
    key = mirror_key(relation)
    if not key:
        refuse_keyless(relation, changes)
        rows = past_rows(relation, changes)
        special = special_texts(changes)
        return Versions(pa.table({}), rows.drop_columns([SPECIAL]), {}, None, special, ())
    found = versions(changes, key)
    if found.missing:
        raise missing_values(relation, found.missing)
    return found


def _merge(table: Handle, relation: Relation, found: Versions, said: CommitProperties) -> None:
    """One commit that ends what the changes have ended, and adds what they have left."""
    key = mirror_key(relation)
    wanted = lake_schema(history_schema(relation))
    rows = completed(table, relation, found, key, wanted.names, CURRENT).cast(wanted)
    refuse_homeless_keys(relation.table, rows, table.partitions(), key)
    if not key:
        table.append(rows, said)
        return
    source = pa.concat_tables([marked(rows, VERSION), marked(widened(found.ended, wanted), ENDED)])
    same = " AND ".join(f"s.{quoted(name)} = t.{quoted(name)}" for name in key)
    on = f"s.{KIND} = {ENDED} AND t.{IS_CURRENT} AND {same} AND s.{SEQ} > t.{SEQ}"
    values = {quoted(name): f"s.{quoted(name)}" for name in wanted.names}
    steps = {"end": (ENDS, f"s.{END_POSITION} <> t.{POSITION}"), "insert": (values, f"s.{KIND} = {VERSION}")}
    table.merge(source, on, steps, f"s.{END_POSITION} = t.{POSITION}", said)


def _end_all(table: Handle, truncate: pa.Table, said: CommitProperties) -> None:
    """What a TRUNCATE ends: every current version."""
    source = pa.table(
        {
            IS_CURRENT: pa.array([True]),
            VALID_TO: whole(truncate["_ms_commit_ts"]),
            END_POSITION: whole(truncate[POSITION]),
        }
    )
    on = f"s.{IS_CURRENT} = t.{IS_CURRENT}"
    steps = {"end": (ENDS, f"s.{END_POSITION} <> t.{POSITION}")}
    table.merge(source, on, steps, f"s.{END_POSITION} = t.{POSITION}", said)


def marked(rows: pa.Table, kind: int) -> pa.Table:
    """Rows for a merge, of this kind."""
    return rows.append_column(KIND, whole_numbers(np.full(rows.num_rows, kind)))
