"""What targets hold of rows with every kind of value, without Spark: what is expected, and what a repair leaves."""

from __future__ import annotations

import os
import pickle
import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake

from millstream.changelog import exposed
from millstream.embedded import EmbeddedPostgres
from millstream.engine.compare import Comparison, Differing, Repair
from millstream.errors import TargetRefused
from millstream.model import BatchLimits, Relation, SeqRange, TargetSpec
from millstream.sources import take_snapshot
from millstream.spark.baseline import BaselinePlan, ChunkRows, read_chunks
from millstream.targets import open_target
from millstream.targets.base import (
    Attempt,
    Lane,
    LaneBatch,
    Part,
    Reader,
    Repairable,
    Target,
    TargetContext,
    Verifiable,
)
from millstream.targets.forms import told
from millstream.targets.lanes.tables import mirror_key
from millstream.transforms.compiled import compiled
from millstream.transforms.shape import FieldFilter, Shape, Shaping, Step
from tests.fixtures.baselines import TABLES, write
from tests.fixtures.capture import drive, source_spec
from tests.fixtures.forks import run
from tests.fixtures.postgres import Database, fresh_database
from tests.fixtures.repairing import do, do_what_is_in
from tests.fixtures.type_oracle import available
from tests.fixtures.type_oracle import texts as some_texts
from tests.fixtures.typed_values import KINDS as TYPES
from tests.fixtures.typed_values import SETUP

pytestmark = pytest.mark.postgres

PLANTED = ("item", "parts")
"""Differences are in the first; the second stays as it is."""
CONTEXT = TargetContext("shop", "copy", "journal-a", "aaaa", 1, "run-1")
SEQ = 5

KINDS: dict[str, dict[str, Any]] = {
    "files": {"path": "log"},
    "delta": {"path": "lake"},
    "delta soft": {
        "path": "soft",
        "deletes": "soft",
        "partition_by": {"public.item": ["feels", "flag"], "public.parts": ["region"]},
    },
    "delta changelog": {"path": "changes", "write": "changelog", "partition_by": {"public.item": ["_ms_op"]}},
    "delta scd2": {"path": "past", "write": "scd2", "partition_by": {"public.item": ["is_current"]}},
    "duckdb soft": {"path": "soft.db", "deletes": "soft"},
    "duckdb changelog": {"path": "changes.db", "write": "changelog"},
    "sqlite": {"path": "lite.db"},
    "sqlite changelog": {"path": "log.db", "write": "changelog"},
    "postgres": {},
    "postgres changelog": {"write": "changelog"},
}
MIRRORS = [name for name in KINDS if name != "files" and "changelog" not in name]


@pytest.fixture(scope="module")
def source(postgres: EmbeddedPostgres) -> Iterator[Database]:
    with fresh_database(postgres) as made:
        made.sql(TABLES)
        write(made, 1, 200)
        yield made


@pytest.fixture
def copy(postgres: EmbeddedPostgres) -> Iterator[Database]:
    with fresh_database(postgres) as made:
        yield made


def made(name: str, root: Path, copy: Database) -> Target:
    kind = name.split()[0]
    options = dict(KINDS[name])
    if kind == "postgres":
        options["uri"] = copy.uri
    else:
        options["path"] = str(root / options["path"])
    target = open_target(TargetSpec("copy", kind, BatchLimits(1, 1, 1), options=options))
    target.open(CONTEXT)
    return target


def deliver(target: Target, plan: BaselinePlan) -> None:
    stager = target.stager()
    span = SeqRange(SEQ, SEQ)
    numbers: dict[Relation, list[int]] = {}
    for number, chunk in enumerate(plan.snapshot.chunks):
        numbers.setdefault(chunk.relation, []).append(number)
    receipts = []
    if isinstance(stager, Lane):
        read = [(plan.relation_ids[r], ChunkRows(plan, n).changes) for r, n in numbers.items()]
        parts = [Part(changes.relation, number, iter(changes)) for number, changes in read]
        stager.deliver(LaneBatch(span, 100, parts, lambda: None))
    else:
        for number, (relation, of_it) in enumerate(numbers.items()):
            changes, where = ChunkRows(plan, of_it).changes, Attempt(number, 0, baseline=True)
            receipts += stager.stage(changes.relation, plan.relation_ids[relation], iter(changes), where)
    target.publish(span, 100, receipts)


Texts = Counter[tuple[str | None, str]]
"""Rows by key and by all of them."""


def texts(relation: Relation, rows: pa.Table) -> Texts:
    keys, all_of_it = told(rows, [c.name for c in exposed(relation).columns], mirror_key(relation))
    return Counter(zip(keys.to_pylist(), all_of_it.to_pylist(), strict=True))


def held(reader: Reader, relation: Relation) -> Texts:
    found: Texts = Counter()
    for part in reader.parts(relation):
        for rows in reader.read(relation, part):
            found += texts(relation, rows)
    return found


@dataclass
class Compared:
    """A target that was filled from a snapshot of the source, and both sides of it."""

    target: Target
    plan: Comparison

    @property
    def reader(self) -> Reader:
        assert isinstance(self.target, Verifiable)
        return self.target.reader()

    def expected(self, table: int) -> Texts:
        found: Texts = Counter()
        relation = self.plan.relations[table]
        for number, chunk in self.plan.chunks:
            for rows in ChunkRows(self.plan.snapshot, [chunk]).changes if number == table else ():
                found += texts(relation, self.reader.expected(relation, rows))
        return found

    def held(self, table: int) -> Texts:
        return held(self.reader, self.plan.relations[table])

    def check(self, *names: str) -> None:
        """The tables are equal: these, or all."""
        for number, relation in enumerate(self.plan.relations):
            if not names or relation.name in names:
                assert self.held(number) == self.expected(number), relation.table

    def differing(self) -> tuple[Differing, ...]:
        """What Spark finds out of large tables, here of small ones."""
        found = []
        for table in (at for at, relation in enumerate(self.plan.relations) if relation.name in PLANTED):
            source, target = self.expected(table), self.held(table)
            for key in sorted({key for key, _ in (source - target) + (target - source)}, key=str):
                mine = [
                    sum(count for (of, _), count in side.items() if of == key)
                    for side in (source, source - target, target - source)
                ]
                found.append(Differing(table, key, *mine))
        return tuple(found)

    def repair(self) -> Repair:
        assert isinstance(self.target, Repairable)
        return Repair(self.plan.reread(), self.target.repairer(), self.differing())


@contextmanager
def filled(name: str, tmp_path: Path, source: Database, copy: Database) -> Iterator[Compared]:
    """A target of this kind with all tables of the source."""
    with drive(source, tmp_path), closing(take_snapshot(source_spec(source), lambda _: None)) as snapshot:
        found = replace(snapshot.plan, chunks=tuple(one for one in snapshot.plan.chunks if one.relation.columns))
        relations = tuple(dict.fromkeys(chunk.relation for chunk in found.chunks))
        ids = {relation: number + 1 for number, relation in enumerate(relations)}
        rows = BaselinePlan(source_spec(source), found, "aaaa", SEQ, 100, ids, None)
        target = made(name, tmp_path, copy)
        deliver(target, rows)
        assert isinstance(target, Verifiable)
        chunks = tuple((relations.index(chunk.relation), at) for at, chunk in enumerate(found.chunks))
        plan = Comparison(rows, target.reader(), relations, chunks, ())
        yield Compared(target, plan.reread())
        target.close()


@pytest.fixture
def compared(request: pytest.FixtureRequest, tmp_path: Path, source: Database, copy: Database) -> Iterator[Compared]:
    with filled(request.param, tmp_path, source, copy) as made_and_filled:
        yield made_and_filled


@pytest.fixture(scope="module")
def every_type(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """Two tables with a column of each type there is, and of arrays of it, odd values among them."""
    with fresh_database(postgres) as database:
        kinds = [kind for kind in available(database, TYPES) if not kind.needs]
        kinds += [kind.array() for kind in kinds if not kind.name.endswith("[]") and kind.name != "refcursor"]
        half = len(kinds) // 2
        database.sql(f"{SETUP}; CREATE TABLE keyed (); CREATE TABLE whole ()")
        for number, some in enumerate((kinds[:half], kinds[half:])):
            columns = ", ".join(f"c{at} {kind.declared}" for at, kind in enumerate(some))
            database.sql(f"CREATE TABLE many_{number} (id int PRIMARY KEY, {columns})")
            rows = zip(*[some_texts(kind, 20) for kind in some], strict=True)
            marks = ", ".join(f"%s::{kind.declared}" for kind in some)
            with database.connect() as connection, connection.cursor() as cursor:
                cursor.executemany(
                    f"INSERT INTO many_{number} VALUES (%s, {marks})", [(at, *row) for at, row in enumerate(rows)]
                )
        yield database


@pytest.mark.skipif("MILLSTREAM_TYPE_MATRIX" not in os.environ, reason="`make types` compares values of every type")
@pytest.mark.parametrize("name", [name for name in KINDS if name != "delta soft"])
def test_values_of_every_type_are_equal_to_themselves(
    name: str, tmp_path: Path, every_type: Database, copy: Database
) -> None:
    with filled(name, tmp_path, every_type, copy) as found:
        found.check()
        assert [found.held(number).total() for number in range(2)] == [20, 20]


SHAPE = Shape(
    fields=(FieldFilter("flag", "equals", (True,), ("public.item",)),),
    transforms=(
        Step("drop", (("raw", None),), ("public.item",)),
        Step("rename", (("note", "remark"),), ("public.item",)),
        Step("cast", (("cost", "string"),), ("public.item",)),
        Step("add", (("origin", "shop"),), ("public.item",)),
    ),
)


@pytest.mark.parametrize("name", ["files", "sqlite", "postgres"])
def test_a_filtered_and_transformed_table_is_what_a_target_holds(
    name: str, tmp_path: Path, source: Database, copy: Database
) -> None:
    with drive(source, tmp_path), closing(take_snapshot(source_spec(source), lambda _: None)) as snapshot:
        (at,) = [at for at, chunk in enumerate(snapshot.plan.chunks) if chunk.relation.name == "item"]
        item = snapshot.plan.chunks[at].relation
        found = replace(snapshot.plan, chunks=(snapshot.plan.chunks[at],))
        shaping = Shaping("shop", SHAPE, mirrors=name != "files")
        rows = BaselinePlan(source_spec(source), found, "aaaa", SEQ, 100, {item: 1}, None, shaping)
        target = made(name, tmp_path, copy)
        deliver(target, rows)
        assert isinstance(target, Verifiable)
        bound = compiled(shaping, item)
        assert bound is not None
        plan = Comparison(rows, target.reader(), (bound.relation,), ((0, 0),), ())
        shaped = Compared(target, plan.reread())
        shaped.check()
        assert shaped.held(0).total() == 66
        target.close()


@pytest.mark.parametrize("compared", KINDS, indirect=True)
def test_what_a_target_holds_is_what_is_expected_of_the_sources_rows(compared: Compared) -> None:
    compared.check()
    sizes = {relation.name: compared.expected(at).total() for at, relation in enumerate(compared.plan.relations)}
    assert sizes == {"item": 200, "keyless": 200, "nothing": 0, "parts": 200, 'Odd "name': 200}


@pytest.mark.parametrize("compared", ["sqlite"], indirect=True)
def test_a_second_try_of_a_baseline_tells_what_the_first_has_written(compared: Compared) -> None:
    lane = compared.target.stager()
    plan = replace(compared.plan.snapshot, stager=lane)
    told = list(read_chunks(plan, range(len(plan.snapshot.chunks)), 1))
    rows = Counter[str]()
    for receipt in (row for batch in told for row in batch.to_pylist()):
        rows[receipt["table"]] += receipt["rows"]
    assert rows == {f"public.{name}": 200 for name in ("item", "keyless", "parts", 'Odd "name')}


def plant(name: str, root: Path, copy: Database) -> None:
    """In `item` a row that is gone, one that is another (and says that it is newer than all), one too many."""
    options = KINDS[name]
    soft = ", _ms_deleted" if "soft" in name else ""
    statements = (
        "DELETE FROM {t} WHERE id = 1",
        "UPDATE {t} SET note = 'planted', _ms_seq = 1099511627776 WHERE id = 2",
        f"INSERT INTO {{t}} (id, _ms_seq{soft}) VALUES (777777, 1{', false' if soft else ''})",
    )
    if name == "postgres":
        copy.sql("; ".join(statements).format(t="item"))
    elif name == "sqlite":
        with closing(sqlite3.connect(root / options["path"])) as lite:
            for statement in statements:
                lite.execute(statement.format(t='"public.item"'))
            lite.commit()
    elif name.startswith("duckdb"):
        with closing(duckdb.connect(str(root / options["path"]))) as duck:
            for statement in statements:
                duck.execute(statement.format(t="public.item"))
            duck.execute("INSERT INTO public.item SELECT * FROM public.item WHERE id = 3")
    else:
        table = DeltaTable(str(root / options["path"] / "public.item"))
        table.delete("id = 1")
        table.update(updates={"note": "'planted'", "_ms_seq": str(1 << 40)}, predicate="id = 2")
        rows = table.to_pyarrow_table()
        twice = rows.filter(pc.equal(rows["id"], 3))
        write_deltalake(table, pa.concat_tables([twice, _extra(twice)]), mode="append")


def _extra(like: pa.Table) -> pa.Table:
    row = {"id": 777777, "_ms_seq": 1, "_ms_deleted": False, "is_current": True, "_ms_position": ""}
    return pa.Table.from_pylist([row], schema=like.schema)


@pytest.mark.parametrize("compared", MIRRORS, indirect=True)
def test_planted_differences_are_found_and_repaired(
    compared: Compared, request: pytest.FixtureRequest, tmp_path: Path, copy: Database
) -> None:
    name = request.node.callspec.params["compared"]
    plant(name, tmp_path, copy)
    twice = {} if name in ("postgres", "sqlite") else {'{"id":3}': "changed"}
    wrong = {'{"id":1}': "missing", '{"id":2}': "changed", '{"id":777777}': "extra", **twice}
    assert {one.key: one.kind for one in compared.differing()} == wrong
    work = compared.repair()
    do(work)
    do(work)
    compared.check(*PLANTED)
    with pytest.raises(AssertionError, match="TargetRefused"):
        do(replace(work, plan=replace(work.plan, snapshot=replace(work.plan.snapshot, seq=SEQ + 1))))


@pytest.mark.chaos
@pytest.mark.parametrize("compared", ["sqlite", "delta"], indirect=True)
def test_a_repair_that_is_killed_is_done_by_the_next(
    compared: Compared, request: pytest.FixtureRequest, tmp_path: Path, copy: Database
) -> None:
    name = request.node.callspec.params["compared"]
    plant(name, tmp_path, copy)
    for step in ["repair.table_committed"] if name == "delta" else ["repair.written", "repair.committed"]:
        (tmp_path / "work").write_bytes(pickle.dumps(compared.repair()))
        ended = run(do_what_is_in, str(tmp_path / "work"), environment={"MILLSTREAM_FAILPOINT": step})
        assert ended.code == -signal.SIGKILL, (step, ended.stderr)
        assert bool(compared.differing()) == (step == "repair.written")
    if compared.differing():
        do(compared.repair())
    compared.check(*PLANTED)


def test_a_repair_belongs_to_the_run_that_has_the_target(tmp_path: Path, source: Database, copy: Database) -> None:
    target = made("sqlite", tmp_path, copy)
    assert isinstance(target, Repairable)
    old = target.repairer()
    made("sqlite", tmp_path, copy).open(replace(CONTEXT, run_id="run-2"))
    with pytest.raises(TargetRefused, match="does not stand at seq 5 any more"):
        old.repair(SEQ, [])
