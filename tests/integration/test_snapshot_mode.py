"""`mode: snapshot`: the tables once, whole, and nothing left on the source. Tasks run without Spark."""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from typer.testing import CliRunner

from millstream import Engine, Mode, StreamSpec, StreamState, TargetSpec
from millstream.cli.app import app
from millstream.embedded import EmbeddedPostgres
from millstream.errors import ConfigError, NotReady
from millstream.sources import preflight_copy
from millstream.sources.base import Severity
from millstream.sources.postgres.catalog import relations
from millstream.targets.directory import directory_of
from tests.fixtures.baselines import NAMES, TABLES, differing, rows_read, write
from tests.fixtures.capture import source_spec
from tests.fixtures.delivering import deliver
from tests.fixtures.delivery import Watching, commits_of
from tests.fixtures.engines import QUICK, await_that
from tests.fixtures.forks import run
from tests.fixtures.postgres import Database, fresh_database

pytestmark = pytest.mark.postgres

ROWS = [(1, "one"), (2, "two"), (3, None)]


@pytest.fixture
def other(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """Another database, to copy to."""
    with fresh_database(postgres) as made:
        yield made


def stream(database: Database, *targets: TargetSpec) -> StreamSpec:
    return StreamSpec("copy", source_spec(database), Mode.SNAPSHOT, targets, checkpoint_interval_ms=100)


def target(kind: str, **options: Any) -> TargetSpec:
    return TargetSpec(kind, kind, QUICK, options=options)


def files(root: Path) -> TargetSpec:
    return target("files", path=str(root / "files"))


def create(database: Database) -> None:
    database.sql("CREATE TABLE orders (id int PRIMARY KEY, note text); CREATE TABLE nothing (id int PRIMARY KEY)")
    database.sql("INSERT INTO orders VALUES (1, 'one'), (2, 'two'), (3, NULL)")


def left_on(database: Database) -> list[tuple[Any, ...]]:
    slots = f"SELECT slot_name FROM pg_replication_slots WHERE database = '{database.name}'"
    return [*database.sql(slots), *database.sql("SELECT pubname FROM pg_publication")]


def held(root: Path, other: Database) -> dict[str, list[tuple[Any, ...]]]:
    """What each target has of `orders`."""
    import duckdb
    import pyarrow.parquet as pq
    from deltalake import DeltaTable

    wanted = "SELECT id, note FROM {} ORDER BY id"
    with closing(sqlite3.connect(root / "copy.sqlite")) as lite, duckdb.connect(root / "copy.duckdb") as duck:
        found = {
            "sqlite": lite.execute(wanted.format('"public.orders"')).fetchall(),
            "duckdb": duck.execute(wanted.format("public.orders")).fetchall(),
            "postgres": other.sql(wanted.format("orders")),
        }
    lake = DeltaTable(str(root / "lake" / "public.orders")).to_pyarrow_table(columns=["id", "note"])
    (file,) = (root / "files" / "public.orders").iterdir()
    for name, table in (("delta", lake), ("files", pq.read_table(file, partitioning=None))):
        found[name] = sorted(zip(table["id"].to_pylist(), table["note"].to_pylist(), strict=True))
    return found


def test_every_kind_of_target_gets_a_copy_once_and_nothing_is_left_on_the_source(
    engine: Engine, database: Database, other: Database, tmp_path: Path, watching: Watching
) -> None:
    create(database)
    kinds = {
        "files": files(tmp_path),
        "delta": target("delta", path=str(tmp_path / "lake")),
        "sqlite": target("sqlite", path=str(tmp_path / "copy.sqlite")),
        "duckdb": target("duckdb", path=str(tmp_path / "copy.duckdb")),
        "postgres": target("postgres", uri=other.uri),
    }
    copy = stream(database, *kinds.values())
    with engine:
        engine.upsert_stream(copy)
        status = engine.await_ready("copy", 120)
        assert status.state is StreamState.COMPLETE
        assert status.healthy
        await_that(lambda: bool(watching.of("stream.complete")))
    await_that(lambda: left_on(database) == [])
    assert held(tmp_path, other) == dict.fromkeys(kinds, ROWS)
    database.sql("INSERT INTO orders VALUES (4, 'too late')")
    with engine:
        await_that(lambda: engine.get_status("copy").source.state == "not captured")
        engine.await_ready("copy", 120)
    assert len(watching.of("snapshot.finished")) == len(kinds), "a second run copies nothing"
    assert held(tmp_path, other) == dict.fromkeys(kinds, ROWS)
    status = engine.get_status("copy")
    assert status.state is StreamState.COMPLETE, "also when no process runs it"
    for one in status.targets:
        tables = {table.name: (table.events_replicated, table.snapshot) for table in one.tables}
        assert tables == {"public.orders": (3, "done"), "public.nothing": (0, "done")}
    assert engine.delete_stream("copy")["source"] == "nothing was made on it"


COMMANDED = """\
name: copy
source: {{kind: postgres, uri: "{uri}", tables: [public.orders]}}
mode: snapshot
targets: [{{name: lite, kind: sqlite, path: copy.sqlite}}]
"""


def test_the_command_copies_and_ends(
    database: Database, tmp_path: Path, no_spark: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(database)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "copy.yaml").write_text(COMMANDED.format(uri=database.uri))
    for said in ("stream copy is complete: every target has a copy of the tables",) * 2:
        done = CliRunner().invoke(app, ["run", "copy.yaml"])
        assert done.exit_code == 0, done.output
        assert said in done.stderr
        with closing(sqlite3.connect(tmp_path / "copy.sqlite")) as lite:
            assert lite.execute('SELECT id, note FROM "public.orders" ORDER BY id').fetchall() == ROWS
        database.sql("INSERT INTO orders VALUES (4, 'too late') ON CONFLICT DO NOTHING")
    assert left_on(database) == []


def test_a_copy_with_a_limit_on_columns_and_rows(engine: Engine, database: Database, tmp_path: Path) -> None:
    create(database)
    limits = {"push": True, "columns": {"public.orders": ["id"]}, "rows": {"public.orders": "id > 1"}}
    source = source_spec(database, "public.orders", options=limits)
    with engine:
        engine.upsert_stream(replace(stream(database, target("sqlite", path=str(tmp_path / "c.db"))), source=source))
        engine.await_ready("copy", 120)
    with closing(sqlite3.connect(tmp_path / "c.db")) as lite:
        assert lite.execute('SELECT * FROM "public.orders" ORDER BY id').fetchall() == [(2, 0), (3, 0)]


def test_what_does_not_fit_a_copy_is_refused(engine: Engine, database: Database, tmp_path: Path) -> None:
    create(database)
    copy = stream(database, files(tmp_path))
    with pytest.raises(ConfigError, match="mode snapshot gets no changes"):
        engine.upsert_stream(replace(copy, verify_every_ms=1000))
    engine.upsert_stream(copy)
    with pytest.raises(ConfigError, match="has mode snapshot, and cannot go on with mode cdc"):
        engine.upsert_stream(replace(copy, mode=Mode.CDC))
    with pytest.raises(ConfigError, match="only one of them has mode snapshot"):
        engine.upsert_stream(replace(copy, name="changes", mode=Mode.CDC))
    elsewhere = target("sqlite", path=str(tmp_path / "c.db"))
    nobody = replace(copy, name="nobody", targets=(elsewhere,), source=source_spec(database, "public.nobody_*"))
    with engine:
        engine.upsert_stream(nobody)
        with pytest.raises(NotReady, match="name no table that can be copied"):
            engine.await_ready("nobody", 120)


def test_a_copy_needs_no_publication_but_the_right_to_read(database: Database) -> None:
    create(database)
    database.sql("CREATE ROLE reader LOGIN REPLICATION")
    try:
        uri = database.uri.replace("postgres@", "reader@", 1)
        spec = replace(source_spec(database, "public.orders"), uri=uri)
        wrong = [one for one in preflight_copy(spec) if one.severity is Severity.ERROR]
        assert [(one.check, one.table) for one in wrong] == [("rights", "public.orders")]
        database.sql("GRANT SELECT ON orders TO reader")
        assert [one for one in preflight_copy(spec) if one.severity is Severity.ERROR] == []
    finally:
        database.sql("DROP OWNED BY reader; DROP ROLE reader")


def test_a_copy_that_is_killed_starts_again_and_doubles_nothing(database: Database, tmp_path: Path) -> None:
    database.sql(TABLES)
    write(database, 1, 200)
    place, state = tmp_path / "there", tmp_path / "failpoints"
    state.mkdir()
    armed = ["files.renamed", "snapshot.published"]
    order = (str(tmp_path), "files", {"path": str(place)}, database.uri, database.name, "snapshot")
    environment = {"MILLSTREAM_FAILPOINT": ",".join(armed), "MILLSTREAM_FAILPOINT_STATE": str(state)}
    codes = []
    while not codes or codes[-1] != 0:
        done = run(deliver, *order, environment=environment)
        codes.append(done.code)
        assert done.code in (0, -signal.SIGKILL), done.stderr
    assert sorted(path.name.removesuffix(".fired") for path in state.glob("*.fired")) == sorted(armed)
    with database.connect() as connection:
        found = {relation.name: relation for relation in relations(connection, ["public.*"])}
    directories = {name: directory_of(found[name]) for name in NAMES}
    assert differing(database, place, found, directories) == []
    rows = rows_read(place, list(directories.values()))
    assert pc.count_distinct(rows["_ms_event_id"]).as_py() == rows.num_rows
    assert len(commits_of(place)) == 1
    # A temporary slot goes when the server notices the end of its connection.
    await_that(lambda: left_on(database) == [])
