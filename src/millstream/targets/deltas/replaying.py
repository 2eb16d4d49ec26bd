"""Changes that Delta tables have had before, delivered once more. See `targets.lanes.replaying` for the rules.

A changelog has an application transaction of its own for each replay, so that a batch which comes again finds what
is there. Tombstones of mirrors are Arrow files in `_millstream/tombstones`, a directory for each table. A history has
every version already, or is not whole: it is looked at, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.changelog import EPOCH
from millstream.errors import TargetRefused
from millstream.failpoint import failpoint
from millstream.latest import SEQ, Bools, Ints, Latest, latest, one_letter, whole, whole_numbers
from millstream.model import Op, Relation, SeqRange
from millstream.targets.deltas.history import pieces
from millstream.targets.deltas.mirror import merge_latest, rows_under
from millstream.targets.deltas.tables import Handle
from millstream.targets.directory import make_directory, sync_directory
from millstream.targets.lanes.replaying import ALL_KEYS, key_text, refuse_unknown
from millstream.targets.lanes.runs import Run
from millstream.targets.lanes.tables import mirror_key
from millstream.versions import POSITION, versions

if TYPE_CHECKING:
    from deltalake import CommitProperties


class Writer(Protocol):
    """What commits to one table."""

    app: str
    name: str

    def schema_of(self, relation: Relation) -> pa.Schema: ...

    def said(self, seq: int | None, app: str | None = None) -> CommitProperties: ...

    def attempt(self, wanted: pa.Schema, relation: Relation, commit: Callable[[Handle], None]) -> Handle: ...

    def existing(self) -> Handle | None: ...


class Replayed(Protocol):
    """What a replay is told of the mirror."""

    @property
    def current(self) -> frozenset[int]: ...

    @property
    def soft(self) -> bool: ...


@dataclass(frozen=True)
class Tombstones:
    """What newer batches of the replay have removed from one table."""

    root: Path

    def lie_on(self, rows: pa.Table, key: Sequence[str]) -> Bools:
        """For each row whether a newer change has removed it."""
        stones = self._all()
        if stones is None:
            return np.zeros(rows.num_rows, bool)
        truncated = _truncated(stones)
        at = pc.index_in(key_text(rows, key), value_set=stones["key"].combine_chunks())
        removed = pc.fill_null(whole(stones["seq"]).take(at), -1)
        versions = whole(rows[SEQ])
        dead = pc.or_(pc.less(versions, removed), pc.less(versions, truncated))
        return np.array(dead.to_pylist(), bool)

    def truncated(self) -> int:
        """The seq of the last truncate that is remembered; -1 if there was none."""
        stones = self._all()
        return -1 if stones is None else _truncated(stones)

    def _all(self) -> pa.Table | None:
        found = [pa.ipc.open_file(path.read_bytes()).read_all() for path in self._files()]
        return pa.concat_tables(found) if found else None

    def _files(self) -> list[Path]:
        """Those of the newest batch first: of two tombstones of a key the newer one counts."""
        return sorted(self.root.glob("*.arrow"), reverse=True)

    def add(self, found: Latest, key: Sequence[str], name: str) -> None:
        """Durable when it returns. `name` is the batch's: one that comes again has the same."""
        keys, seqs = (key_text(found.gone, key).to_pylist(), found.gone[SEQ].to_pylist()) if key else ([], [])
        if found.truncated is not None:
            keys, seqs = [*keys, ALL_KEYS], [*seqs, found.truncated]
        if not keys:
            return
        make_directory(self.root)
        stones = pa.table({"key": pa.array(keys, pa.string()), "seq": pa.array(seqs, pa.int64())})
        path = self.root / f"{name}.tmp"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, stones.schema) as writer:
            writer.write_table(stones)
        path.replace(self.root / f"{name}.arrow")
        sync_directory(self.root)


def write_marked(
    writer: Writer, runs: Sequence[Callable[[], Run]], logged: Callable[[pa.Table], pa.Table], mark: int
) -> None:
    """Append the changes that this replay has not brought to the changelog yet; each commit says up to where.

    `logged` gives changes the form of the changelog.
    """
    app = f"{writer.app}/replay/{mark}"
    for read in runs:
        run = read()
        wanted = writer.schema_of(run.relation).append(pa.field(EPOCH, pa.int64()))

        def commit(table: Handle, changes: pa.Table = run.changes, wanted: pa.Schema = wanted) -> None:
            done = table.transaction_version(app)
            if done is not None:
                changes = changes.filter(pc.greater(changes[SEQ], done))
            if changes.num_rows:
                marks = pa.repeat(pa.scalar(mark, pa.int64()), changes.num_rows)
                rows = logged(changes).append_column(EPOCH, marks).cast(wanted)
                table.append(rows, writer.said(int(changes[SEQ][-1].as_py()), app))

        writer.attempt(wanted, run.relation, commit)
        failpoint("replay.changelog_committed")


def check_versions(writer: Writer, runs: Sequence[Callable[[], Run]]) -> None:
    """Raise TargetRefused if a history lacks a version that these changes have left. Nothing is written.

    What a transaction wrote first that goes on in the next run, or that truncates, need not be there.
    """
    expected: list[pa.Table] = []
    latest_position: str | None = None
    for read in runs:
        run = read()
        key = mirror_key(run.relation)
        for piece in pieces(run.changes) if key else ():
            if latest_position == piece[POSITION][0].as_py():
                expected[-1:] = [last.filter(pc.not_equal(last[POSITION], latest_position)) for last in expected[-1:]]
            if one_letter(whole(piece["_ms_op"]))[0] != Op.TRUNCATE:
                expected.append(versions(piece, key).rows.select([SEQ, POSITION]))
            latest_position = piece[POSITION][-1].as_py()
    wanted = pa.concat_tables(expected)[SEQ] if expected else pa.chunked_array([], pa.int64())
    table = writer.existing() if len(wanted) else None
    if table is None:
        return
    within = (pc.field(SEQ) >= pc.min(wanted)) & (pc.field(SEQ) <= pc.max(wanted))
    lacking = pc.sum(pc.invert(pc.is_in(wanted, value_set=whole(table.read([SEQ], within)[SEQ])))).as_py()
    if lacking:
        raise TargetRefused(
            f"{writer.name}: the history lacks {lacking} versions that these changes have left",
            hint="versions are not put in later: begin a new target",
        )


def restore_runs(
    writer: Writer, runs: Sequence[Callable[[], Run]], stones: Tombstones, span: SeqRange, of: Replayed
) -> None:
    """Write what a mirror lacks of a batch, newest changes first, and remember what they have removed."""
    for number, read in reversed(list(enumerate(runs))):
        run = read()
        found: list[Latest] = []
        if run.relation_id not in of.current:
            continue

        def commit(table: Handle, run: Run = run, found: list[Latest] = found) -> None:
            found.append(restore(table, run, stones, writer.said(None), soft=of.soft))

        writer.attempt(writer.schema_of(run.relation), run.relation, commit)
        failpoint("replay.mirror_committed")
        stones.add(found[-1], mirror_key(run.relation), f"{span.end:020d}-{number:06d}")
        failpoint("replay.buried")


def restore(table: Handle, run: Run, stones: Tombstones, said: CommitProperties, *, soft: bool) -> Latest:
    """Write what the mirror lacks of these changes. Returns what they come to. An intact mirror gets no commit."""
    relation, changes = run.relation, run.changes
    key = mirror_key(relation)
    found = latest(changes, key)
    lacking = np.flatnonzero(~_has(table, found.rows, key) & ~stones.lie_on(found.rows, key))
    refuse_unknown(run, found, lacking, key)
    stale = np.flatnonzero(_older(table, found.gone, key))
    special = {name: texts.take(whole_numbers(lacking)) for name, texts in found.special.items()}
    gone, rows = found.gone.take(whole_numbers(stale)), found.rows.take(whole_numbers(lacking))
    if found.truncated is not None and _any_before(table, found.truncated):
        table.remove_older(found.truncated, soft=soft)
        table = table.renewed()
    if len(lacking) or len(stale):
        merge_latest(table, relation, Latest(None, gone, rows, special=special), key, said, soft=soft)
    return found


def _truncated(stones: pa.Table) -> int:
    last = pc.max(stones.filter(pc.equal(stones["key"], ALL_KEYS))["seq"]).as_py()
    return -1 if last is None else int(last)


def _versions(table: Handle, rows: pa.Table, key: tuple[str, ...]) -> Ints:
    """The version under which the table has each key; -2 where it has none."""
    versions = np.full(rows.num_rows, -2, np.int64)
    if rows.num_rows:
        there = rows_under(table, rows.select(list(key)), key, [SEQ])
        versions[np.array(there["_ms_place"].to_pylist(), np.int64)] = np.array(there[SEQ].to_pylist(), np.int64)
    return versions


def _has(table: Handle, rows: pa.Table, key: tuple[str, ...]) -> Bools:
    """For each row whether the table has it in this version or a newer one."""
    return _versions(table, rows, key) >= np.array(rows[SEQ].to_pylist(), np.int64)


def _older(table: Handle, gone: pa.Table, key: tuple[str, ...]) -> Bools:
    """For each key that is gone whether the table still has an older row under it."""
    versions = _versions(table, gone, key)
    return (versions > -2) & (versions < np.array(gone[SEQ].to_pylist(), np.int64))


def _any_before(table: Handle, seq: int) -> bool:
    oldest = pc.min(table.read([SEQ])[SEQ]).as_py()
    return oldest is not None and oldest < seq
