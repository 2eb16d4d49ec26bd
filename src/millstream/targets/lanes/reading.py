"""What a database holds of a mirror, for a comparison with the source; and the repair of what differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from millstream.errors import TargetRefused
from millstream.failpoint import failpoint
from millstream.model import Json, Relation
from millstream.targets.base import Correction, Part, TargetContext
from millstream.targets.lanes.database import Database, LaneOptions
from millstream.targets.lanes.mirror import rewrite
from millstream.targets.lanes.runs import runs
from millstream.targets.lanes.tables import prepare


@dataclass(frozen=True)
class DatabaseReader:
    """What all readers of databases have in common. The database says what its form is."""

    database: type[Database]
    options: LaneOptions

    @property
    def parallel(self) -> bool:
        return self.database.many_readers

    def parts(self, relation: Relation) -> Sequence[Json]:
        opening = self.database(self.options)
        if not opening.is_there():
            return ()
        with opening as db:
            return self.parts_of(db, relation) if db.columns(relation) is not None else ()

    def parts_of(self, db: Database, relation: Relation) -> Sequence[Json]:
        """The parts of a table that is there."""
        return db.parts(relation)

    def expected(self, relation: Relation, rows: pa.RecordBatch) -> pa.Table:
        return self.database.form(relation, pa.Table.from_batches([rows]))


@dataclass(frozen=True)
class LaneReader(DatabaseReader):
    """Of mirrors. See `targets.base.Reader` for the contract."""

    def read(self, relation: Relation, part: Json) -> Iterator[pa.Table]:
        living = "NOT _ms_deleted" if self.options.deletes == "soft" else "true"
        with self.database(self.options) as db:
            yield from db.held(relation, part, living)


@dataclass(frozen=True)
class SqlRepairer:
    """See `targets.base.Repairer` for the contract: one transaction for all of it."""

    database: type[Database]
    options: LaneOptions
    context: TargetContext

    def repair(self, seq: int, corrections: Sequence[Correction]) -> None:
        by_relation = {correction.relation: correction for correction in corrections}
        tables = [[Part(each.relation, each.relation_id, each.rows)] for each in corrections]
        with self.database(self.options) as db:
            with db.transaction():
                self._check(db, seq)
                db.mark(self.context)
                for parts in db.ordered(tables):
                    self._correct(db, by_relation[parts[0].relation], parts, seq)
                db.settle()
                failpoint("repair.written")
            failpoint("repair.committed")

    def _correct(self, db: Database, wrong: Correction, parts: Sequence[Part], seq: int) -> None:
        prepared = prepare(db, wrong.relation, wrong.relation_id, self.context, self.options)
        stale, gone = (db.own_keys(each) for each in (wrong.stale, wrong.gone))
        right = (run.changes for run in runs(parts))
        rewrite(db, prepared, stale, gone, right, seq, soft=self.options.deletes == "soft")

    def _check(self, db: Database, seq: int) -> None:
        """Raise TargetRefused unless the target is ours and stands there. The row is held until the commit."""
        owner = (self.context.stream, self.context.target)
        held = db.run(
            f"UPDATE {db.own('cursors')} SET seq = seq WHERE stream = ? AND target = ? AND run = ? "
            "AND journal_id = ? AND seq = ?",
            (*owner, self.context.run_id, self.context.journal_id, seq),
        )
        if not held:
            raise TargetRefused(
                f"{db.where}: the target does not stand at seq {seq} any more, so that nothing was repaired",
                hint="another process delivers to it; let only one run",
            )
