"""Random histories into a mirror that refuses some rows: once it takes them, and letters are retried, it is equal."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.changelog import assemble
from millstream.engine import repair
from millstream.engine.batch import BatchResult
from millstream.engine.home import Home
from millstream.engine.letters import LetterBox
from millstream.engine.redelivery import Redelivery
from millstream.errors import SourceUnavailable
from millstream.model import BatchLimits, Cursor, Mode, SeqRange, SourceSpec, StreamSpec, TargetSpec
from millstream.state.memory import MemoryStateStore
from millstream.targets.base import Lane, LaneBatch, Part, Target
from millstream.targets.rejects import Guard, Outstanding, position_of
from tests.fixtures.copies import CONTEXT, Copy
from tests.fixtures.examples import examples
from tests.fixtures.histories import History
from tests.fixtures.tuples import insert, journal_rows

COLUMNS = "shop INTEGER NOT NULL, id TEXT NOT NULL, note TEXT, doc TEXT, amount TEXT {check}, _ms_seq INTEGER"
REFUSED = "CHECK (amount IS NULL OR amount <> '-0.01')"


@dataclass(frozen=True)
class Plan:
    """As much of a batch's plan as letters are about."""

    outstanding: Outstanding | None = None
    isolate: bool = False


class Retrying(Redelivery):
    """A retry without a journal beside it."""

    def _open(self, target: Target) -> None:
        target.open(CONTEXT)


class Mirror:
    """A copy whose table refuses some amounts, its letters, and the source as it is in the end."""

    def __init__(self, root: Path, history: History, deletes: str) -> None:
        self.path, self.history = root / "copy.db", history
        more = ", _ms_deleted INTEGER DEFAULT 0" if deletes == "soft" else ""
        self._create = f'CREATE TABLE "public.t" ({COLUMNS}{more}, PRIMARY KEY (shop, id))'
        with closing(sqlite3.connect(self.path)) as db:
            db.execute(self._create.format(check=REFUSED))
        self.copy = Copy(self.path, "sqlite", deletes=deletes)
        options = {"path": str(self.path), "deletes": deletes}
        self.spec = TargetSpec("copy", "sqlite", BatchLimits(1, 1, 1), options=options)
        self.stream = StreamSpec("shop", SourceSpec("s", "postgres", "", None, ()), Mode.CDC, (self.spec,))
        self.store = MemoryStateStore()
        self.box = LetterBox(self.store, self.stream, self.spec, self.copy.target, lambda *_: None)
        self.root = root

    def deliver(self, changes: pa.Table) -> None:
        span = SeqRange(changes["_ms_seq"][0].as_py() - 1, changes["_ms_seq"][-1].as_py())
        superseded: dict[str, int] = {}

        def attempt(plan: Any) -> BatchResult:
            guard = Guard(plan.outstanding or Outstanding())
            passed = guard.passed(self.history.relation, 1, iter(changes.combine_chunks().to_batches()))
            lane = self.copy.target.stager()
            assert isinstance(lane, Lane)
            part = Part(self.history.relation, 1, passed)
            assert lane.deliver(LaneBatch(span, span.end, [part], guard.check, plan.isolate))
            superseded.update(guard.superseded)
            return BatchResult((), 0)

        self.box.deliver(Plan(), attempt)  # type: ignore[type-var]
        end = position_of(changes["_ms_position"][-1].as_py()) + 50
        self.store.save_cursor(Cursor("shop", "copy", "journal-a", 1, span.end, end), superseded=superseded)

    def take_everything(self) -> None:
        with closing(sqlite3.connect(self.path)) as db:
            db.execute('ALTER TABLE "public.t" RENAME TO old')
            db.execute(self._create.format(check=""))
            db.execute('INSERT INTO "public.t" SELECT * FROM old')
            db.commit()

    def retry(self) -> None:
        ids = [letter.id for letter in self.store.letters()]
        Retrying(Home(self.root), self.store, self.stream, "copy").run(ids)

    def rows(self) -> set[tuple[Any, ...]]:
        living = " WHERE NOT _ms_deleted" if "_ms_deleted" in self._create else ""
        return set(self.copy.rows(f"SELECT shop, id, note, doc, {{amount}} FROM {{t}}{living}"))


def source_of(history: History) -> tuple[pa.Table, int]:
    """What a reader of the source finds when the history is over, and until when that is of account."""
    rows = journal_rows([insert(*row) for row in history.rows.values()])
    found = pa.Table.from_batches([assemble(rows, history.relation, 1, "aaaa")])
    writers = pa.array([history.writers[-1][key] for key in history.rows], pa.int64())
    place = found.column_names.index("_ms_txid")
    return found.set_column(place, "_ms_txid", writers), history.transactions[-1] * 100 + 1


@settings(max_examples=examples(10), deadline=None)
@given(
    st.integers(0, 10**9),
    st.booleans(),
    st.booleans(),
    st.integers(1, 60),
    st.lists(st.integers(0, 10**6), max_size=8),
    st.sampled_from(["hard", "soft"]),
    st.booleans(),
)
def test_a_mirror_equals_its_source_once_it_takes_what_it_refused(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    full: bool,
    alike: bool,
    steps: int,
    cuts: list[int],
    deletes: str,
    asked: bool,
) -> None:
    history = History(seed, full, alike=alike).play(steps)
    mirror = Mirror(tmp_path_factory.mktemp("mirror"), history, deletes)
    expected = {(int(shop), *rest) for shop, *rest in history.rows.values()}

    def read(*_: Any) -> tuple[pa.Table, int]:
        if not may_ask:
            raise SourceUnavailable("the source is away")
        return source_of(history)

    may_ask = asked
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repair, "_read", read)
        for changes in history.batches(cuts):
            mirror.deliver(changes)
            assert not {row for row in mirror.rows() if row[4] == "-0.01"}
        open_keys = {letter.key for letter in mirror.store.letters() if letter.superseded_by is None}
        keys = {(row[0], row[1]) for row in mirror.rows() ^ expected}
        assert {f'{shop},"{id_}"' for shop, id_ in keys} <= open_keys, "a row differs that is no letter"
        may_ask = True
        mirror.take_everything()
        mirror.retry()
        assert mirror.rows() == expected
        # One that was refused before a later one of its row was delivered is obsolete now.
        mirror.retry()
        assert mirror.rows() == expected
        assert mirror.store.letters() == []
