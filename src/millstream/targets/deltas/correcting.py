"""What a history has wrong, put right by rows that the source has at a moment: in a repair, and when a table is copied.

A history is not written anew. A version that is current and is not the source's ends at that moment, and the source's
begins there; one that is the source's stays as it is. So what was told wrongly stays told, up to when that was noticed,
and from then on the history is right. What a change has written since the moment is newer, and is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.changelog import END_POSITION, exposed, schema
from millstream.failpoint import failpoint
from millstream.latest import SEQ, booleans, whole_numbers
from millstream.model import Relation
from millstream.targets.base import ReloadStep
from millstream.targets.deltas.history import CURRENT, ENDED, ENDS, KIND, VERSION, history_schema, marked, past_rows
from millstream.targets.deltas.mirror import quoted, widened
from millstream.targets.deltas.partitions import refuse_homeless_keys, restored
from millstream.targets.deltas.replaying import Tombstones, Writer
from millstream.targets.deltas.spool import Spooled
from millstream.targets.deltas.tables import Handle, lake_schema
from millstream.targets.forms import form_schema, told
from millstream.targets.lanes.runs import Run
from millstream.targets.lanes.tables import mirror_key
from millstream.versions import IS_CURRENT, POSITION, VALID_TO

if TYPE_CHECKING:
    from deltalake import CommitProperties

PIECE_ROWS = 1 << 18
"""So many versions are compared at a time."""


@dataclass(frozen=True)
class Moment:
    """When the source had its rows."""

    seq: int
    at: datetime
    position: int

    @property
    def position_text(self) -> str:
        """As `_ms_position` has it."""
        return f"{self.position >> 32:08X}/{self.position & 0xFFFFFFFF:08X}"


def correct(
    table: Handle, relation: Relation, wrong: pa.Table, right: pa.Table, moment: Moment, said: CommitProperties
) -> None:
    """One commit: what is current under the keys of `wrong` ends, and the rows `right` (of a changelog) begin.

    Doing it again changes nothing: a version that would end where it began goes, and comes again.
    """
    key, wanted = mirror_key(relation), lake_schema(history_schema(relation))
    rows = past_rows(relation, right).cast(wanted)
    refuse_homeless_keys(relation.table, rows, table.partitions(), key)
    ended = _ending(wrong.select(list(key)), moment)
    source = pa.concat_tables([marked(rows, VERSION), marked(widened(ended, wanted), ENDED)])
    if not source.num_rows:
        return
    same = " AND ".join(f"s.{quoted(name)} = t.{quoted(name)}" for name in key)
    values = {quoted(name): f"s.{quoted(name)}" for name in wanted.names}
    steps = {"end": (ENDS, f"s.{END_POSITION} <> t.{POSITION}"), "insert": (values, f"s.{KIND} = {VERSION}")}
    on = f"s.{KIND} = {ENDED} AND t.{IS_CURRENT} AND {same}"
    table.merge(source, on, steps, f"s.{END_POSITION} = t.{POSITION}", said)


def copy_history(writer: Writer, table: Spooled, stones: Tombstones, step: ReloadStep) -> None:
    """Bring all rows of a table, which are one step, to its history."""
    relation, moment = table.relation, Moment(step.seq, step.taken_at, step.position)
    wanted, key = writer.schema_of(relation), mirror_key(relation)
    if not key:
        _begin_anew(writer, table, stones, moment)
        return
    seen = []
    for read in table.runs:
        run = read()

        def commit(handle: Handle, run: Run = run) -> None:
            wrong, right = _differing(handle, run, stones, moment)
            correct(handle, run.relation, wrong, right, moment, writer.said(None))

        writer.attempt(wanted, run.relation, commit)
        failpoint("reload.history_merged")
        seen.append(_keys(relation, run.changes))

    def end_rest(handle: Handle) -> None:
        gone = _gone(handle, relation, pa.concat_arrays(seen) if seen else pa.array([], pa.string()), moment)
        correct(handle, relation, gone, schema(relation).empty_table(), moment, writer.said(None))

    writer.attempt(wanted, relation, end_rest)
    failpoint("reload.history_swept")


def _begin_anew(writer: Writer, table: Spooled, stones: Tombstones, moment: Moment) -> None:
    """Rows that cannot be told apart: all versions from before end, and all rows begin."""
    relation, wanted = table.relation, writer.schema_of(table.relation)

    def end_all(handle: Handle) -> None:
        source = _ending(pa.table({IS_CURRENT: pa.array([True])}), moment)
        on = f"s.{IS_CURRENT} = t.{IS_CURRENT} AND t.{SEQ} <= s.{SEQ}"
        steps = {"end": (ENDS, f"s.{END_POSITION} <> t.{POSITION}")}
        handle.merge(source, on, steps, f"s.{END_POSITION} = t.{POSITION}", writer.said(None))

    writer.attempt(wanted, relation, end_all)
    for read in table.runs if stones.truncated() <= moment.seq else ():
        run = read()

        def commit(handle: Handle, run: Run = run) -> None:
            handle.append(past_rows(run.relation, run.changes).cast(wanted), writer.said(None))

        writer.attempt(wanted, run.relation, commit)
        failpoint("reload.history_begun")


def _ending(keys: pa.Table, moment: Moment) -> pa.Table:
    count = keys.num_rows
    more = {
        SEQ: pa.repeat(pa.scalar(moment.seq, pa.int64()), count),
        VALID_TO: pa.repeat(pa.scalar(moment.at, pa.timestamp("us", "UTC")), count),
        END_POSITION: pa.repeat(pa.scalar(moment.position_text), count),
    }
    for name, values in more.items():
        keys = keys.append_column(name, values)
    return keys


def _differing(table: Handle, run: Run, stones: Tombstones, moment: Moment) -> tuple[pa.Table, pa.Table]:
    """The rows of a run that the history does not have like this: those to be ended before, and those to begin."""
    relation, rows = run.relation, run.changes
    expected = rows.select(form_schema(relation).names).cast(lake_schema(form_schema(relation)))
    keys, texts = _told(relation, expected)
    # -1: there is no such version, 0: another one, 1: the same, or a newer one.
    found = np.full(rows.num_rows, -1, np.int8)
    for held in _current(table, relation):
        held_keys, held_texts = _told(relation, held)
        place = pc.fill_null(pc.index_in(held_keys, value_set=keys), -1).to_numpy()
        mine = np.flatnonzero(place >= 0)
        at = place[mine].astype(np.int64)
        same = booleans(pc.equal(held_texts.take(whole_numbers(mine)), texts.take(whole_numbers(at))))
        newer = held[SEQ].to_numpy()[mine] > moment.seq
        found[at] = same | newer
    wrong = np.flatnonzero(found == 0)
    removed = stones.lie_on(rows, mirror_key(relation))
    right = np.flatnonzero((found == 0) | ((found == -1) & ~removed))
    return rows.take(whole_numbers(wrong)), rows.take(whole_numbers(right))


def _gone(table: Handle, relation: Relation, seen: pa.StringArray, moment: Moment) -> pa.Table:
    """Keys of current versions from before the moment that no row was seen under."""
    key = list(mirror_key(relation))
    found = [form_schema(relation).empty_table().select(key)]
    for held in _current(table, relation):
        texts, _ = _told(relation, held)
        stays = pc.or_(pc.is_in(texts, value_set=seen), pc.greater(held[SEQ], moment.seq))
        found.append(held.select(key).filter(pc.invert(stays)).cast(found[0].schema))
    return pa.concat_tables(found)


def _current(table: Handle, relation: Relation) -> Iterator[pa.Table]:
    """The current versions, some at a time, in the form in which rows are compared, and their versions."""
    wanted = lake_schema(form_schema(relation)).append(pa.field(SEQ, pa.int64()))
    batches = table.batches(0, 1, wanted.names, CURRENT)
    for some in _gathered(batches):
        columns = [
            some[field.name].cast(field.type) if field.name in some.column_names else pa.nulls(len(some), field.type)
            for field in wanted
        ]
        yield restored(pa.table(columns, schema=wanted), table.partitions())


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        if sum(one.num_rows for one in waiting) >= PIECE_ROWS:
            yield pa.Table.from_batches(waiting)
            waiting = []
    if waiting:
        yield pa.Table.from_batches(waiting)


def _keys(relation: Relation, rows: pa.Table) -> pa.StringArray:
    expected = rows.select(form_schema(relation).names).cast(lake_schema(form_schema(relation)))
    return _told(relation, expected)[0]


def _told(relation: Relation, rows: pa.Table) -> tuple[pa.StringArray, pa.StringArray]:
    names = [column.name for column in exposed(relation).columns]
    return told(rows, names, mirror_key(relation))
