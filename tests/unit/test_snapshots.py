"""States of targets, kept and brought back: every value, every refusal, while streams run."""

from __future__ import annotations

import json
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pytest
from pyarrow import fs
from typer.testing import CliRunner

from millstream import Engine, Mode, SnapshotRules, StreamSpec, TargetSpec
from millstream.cli.app import app
from millstream.engine.reload import RELOAD, AskedTables, waiting
from millstream.errors import (
    ConfigError,
    NotReady,
    NotSupported,
    OutOfRange,
    SnapshotError,
    TargetRefused,
    UnknownName,
    UnknownStream,
)
from millstream.observe import Level
from millstream.snapshots.files import Files, LocalFiles
from millstream.snapshots.letters import Open
from millstream.snapshots.remote import RemoteFiles, open_files
from millstream.snapshots.restoring import restore
from millstream.snapshots.rows import Format
from millstream.snapshots.store import SnapshotStore
from millstream.snapshots.taking import Taking
from millstream.state.sqlite import SqliteStateStore
from millstream.targets import open_target
from millstream.targets.base import TargetContext
from millstream.targets.duckdb import MEMORY
from millstream.testing import Script
from tests.fixtures import keeping
from tests.fixtures.delivery import Watching
from tests.fixtures.engines import QUICK, await_that
from tests.fixtures.keeping import spec
from tests.fixtures.tuples import insert

# SQLite: a text in a column of numbers, bytes in one of text, what is not declared.
LITE = [
    *('CREATE TABLE "public.o""x" (id INTEGER PRIMARY KEY, a TEXT, b REAL, c BLOB, d, _ms_seq INTEGER)',),
    'CREATE INDEX "by a" ON "public.o""x" (a)',
    """INSERT INTO "public.o""x" VALUES (1, 'x', 1.5, x'00ff', 2.5, 1), (2, x'6162', 9e999, 'text', 7, 1),
       (3, NULL, 'NaN', NULL, NULL, 2), (9223372036854775807, 'é' || char(10) || '"\\', -1e-300, 12, 't', 3)""",
]
DUCK = [
    "CREATE SCHEMA public",
    """CREATE TABLE public."o""x" ("Id" INTEGER NOT NULL, m MAP(VARCHAR, VARCHAR), n DECIMAL(38, 10), l TIMESTAMP[],
       s STRUCT(a INTEGER, "B c" VARCHAR, x BLOB), z TIMESTAMPTZ, t TIME, f FLOAT, g DOUBLE, d DATE, b BLOB,
       _ms_seq BIGINT DEFAULT -1)""",
    'CREATE INDEX by_id ON public."o""x" ("Id")',
    """INSERT INTO public."o""x" VALUES
       (1, MAP {'a': 'b'}, 1.25, ['infinity', NULL, '2020-01-01'], {'a': 1, 'B c': 'x', 'x': '\\x00'::BLOB},
        'infinity', '12:00:00', 'nan', '-inf', '290000-01-01', '\\xFF'::BLOB, 3),
       (2, NULL, NULL, NULL, NULL, '290000-01-01 00:00:00+00', NULL, NULL, NULL, NULL, NULL, 4),
       (3, MAP {}, 0, [], NULL, '0044-03-15 (BC) 00:00:00+00', '24:00:00', 0.1, 1e-320, 'infinity', '', 4)""",
]
PLACES = {"sqlite": '"public.o""x"', "duckdb": '"public"."o""x"'}


def ask(path: Path, kind: str, *statements: str) -> list[tuple[Any, ...]]:
    """Run statements; the rows of the last one."""
    found: list[tuple[Any, ...]] = []
    if kind == "sqlite":
        with closing(sqlite3.connect(path, isolation_level=None)) as lite:
            for one in statements:
                found = lite.execute(one).fetchall()
        return found
    # In one process all connections to a file must have the same settings.
    with duckdb.connect(str(path), config={"memory_limit": MEMORY}) as duck:
        for one in statements:
            found = duck.execute(one).fetchall()
    return found


def everything(path: Path, kind: str) -> list[list[tuple[Any, ...]]]:
    """Rows with the types of their values, and how the table was made."""
    if kind == "sqlite":
        kinds = ", ".join(f"typeof({name})" for name in "abcd")
        rows = ask(path, kind, f"SELECT *, {kinds} FROM {PLACES[kind]} ORDER BY id")
        return [rows, ask(path, kind, "SELECT sql FROM sqlite_master WHERE tbl_name = 'public.o\"x' ORDER BY type")]
    rows = ask(path, kind, f'SELECT COLUMNS(*)::VARCHAR FROM {PLACES[kind]} ORDER BY "Id"')
    return [
        rows,
        ask(path, kind, "SELECT sql FROM duckdb_tables() WHERE table_name LIKE 'o%'"),
        ask(path, kind, "SELECT sql FROM duckdb_indexes()"),
    ]


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize("kind", PLACES)
def test_every_value_and_index_comes_back_as_it_was(tmp_path: Path, kind: str, format: Format) -> None:
    stream = spec(tmp_path, kind)
    (target,) = stream.targets
    path = tmp_path / f"target.{kind}"
    made: Any = open_target(target)
    made.open(TargetContext("shop", "log", "j", "p", 1, "run"))
    own = "_millstream_" if kind == "sqlite" else "_millstream."
    ask(
        path,
        kind,
        *(LITE if kind == "sqlite" else DUCK),
        f"INSERT INTO {own}tables VALUES ('{PLACES[kind]}', 'shop', 'log', 'mirror', '[\"id\"]')",
        f"UPDATE {own}cursors SET journal_id = 'j', seq = 3, position = 30",
    )
    before = everything(path, kind)
    store = SnapshotStore(f"file://{tmp_path}/kept")
    snapshot = Taking(store, stream, target, made, Open, "home", format, threading.Event()).run()
    store.check(snapshot)
    assert store.get("shop", "log", "latest") == snapshot
    elsewhere = replace(target, options={"path": str(tmp_path / "other")})
    other: Any = open_target(elsewhere)
    assert restore(store, snapshot, other, "token", overwrite=False)
    assert everything(tmp_path / "other", kind) == before
    assert not restore(store, snapshot, other, "token", overwrite=False), "it has it already"
    with pytest.raises(TargetRefused, match="is not empty"):
        restore(store, snapshot, other, "another", overwrite=False)
    assert restore(store, snapshot, other, "another", overwrite=True)
    assert everything(tmp_path / "other", kind) == before
    assert ask(tmp_path / "other", kind, f"SELECT run, seq, position FROM {own}cursors") == [("another", 3, 30)]


def test_a_damaged_file_is_told_and_the_target_left_alone(tmp_path: Path) -> None:
    keeping.home(tmp_path, spec(tmp_path, "sqlite"), [[insert("1", "one")]]).writer.close()
    assert keeping.deliver(str(tmp_path), "sqlite", "mirror", False) == 0
    for format in ("jsonl", "arrow"):
        keeping.create(str(tmp_path), format)
        snapshot = keeping.kept(tmp_path)[-1]
        file = tmp_path / "snapshots" / snapshot.folder / f"00001.{format}"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        with pytest.raises(SnapshotError, match="is not what was written"):
            Engine(tmp_path).inspect_snapshot("shop", path=str(tmp_path / "snapshots"), check=True)
        with pytest.raises(SnapshotError):
            keeping.restore(str(tmp_path), overwrite=True)
        assert keeping.rows(tmp_path, "sqlite") == [(1, "one", 1)]
    (status,) = Engine(tmp_path).get_status("shop").targets
    assert status.restore is not None
    assert status.restore["state"] == "failed"


def test_what_cannot_be_gone_on_from_is_refused_with_the_reason(tmp_path: Path) -> None:
    stream = spec(tmp_path, "sqlite")
    journal = keeping.home(tmp_path, stream, [[insert("1", "one")]], segment_bytes=1 << 12)
    engine, where = Engine(tmp_path), str(tmp_path / "snapshots")
    with pytest.raises(NotReady, match="has nothing yet"):
        keeping.create(str(tmp_path))
    with pytest.raises(ConfigError, match="nothing says where the snapshots of stream shop are"):
        engine.list_snapshots("shop")
    with pytest.raises(ConfigError, match="cannot be kept at a URL of the kind ftp://"):
        engine.list_snapshots("shop", path="ftp://there")
    assert keeping.deliver(str(tmp_path), "sqlite", "mirror", False) == 0
    with pytest.raises(SnapshotError, match="there is no snapshot of target log of stream shop"):
        keeping.restore(str(tmp_path))
    keeping.create(str(tmp_path))
    with pytest.raises(TargetRefused, match="is not empty: it is at seq 1"):
        keeping.restore(str(tmp_path))
    with pytest.raises(UnknownName, match="there is no snapshot 20200101T000000000Z"):
        engine.restore_snapshot("shop", "20200101T000000000Z", path=where)
    with pytest.raises(UnknownStream, match="has no target lag: did you mean log"):
        engine.list_snapshots("shop", "lag", path=where)

    with closing(SqliteStateStore(tmp_path / "state.db")) as store:
        store.save_note("shop", "log", RELOAD, waiting(AskedTables()))
        for refused in (keeping.create, keeping.restore):
            with pytest.raises(NotReady, match="are being copied anew"):
                refused(str(tmp_path))
        over = {**waiting(AskedTables()), "state": "done", "finished_at": datetime.now(UTC).isoformat()}
        store.save_note("shop", "log", RELOAD, over)
        with pytest.raises(SnapshotError, match="from before tables of the target were copied anew"):
            engine.restore_snapshot("shop", path=where, overwrite=True)
        assert "copied anew" in str(engine.inspect_snapshot("shop", path=where)[1])
        store.save_note("shop", "log", RELOAD, {**over, "finished_at": "2020-01-01T00:00:00+00:00"})

    renamed = replace(stream, source=replace(stream.source, tables=("public.orders",)))
    engine.upsert_stream(renamed)
    with pytest.raises(ConfigError, match="the stream's tables have changed since"):
        engine.restore_snapshot("shop", path=where, overwrite=True)
    engine.upsert_stream(stream)

    for number in range(2, 40):
        journal.append(keeping.ORDERS, [insert(str(number), "x" * 1000)])
        journal.seal()
    assert keeping.deliver(str(tmp_path), "sqlite", "mirror", False) == 0
    pruned = journal.writer.prune(3)
    assert pruned is not None
    journal.writer.close()
    message = f"snapshot .* is at seq 1, and seq 2 is not in the journal: it begins at seq {pruned.seq + 1}, position"
    with pytest.raises(OutOfRange, match=message) as refused:
        engine.restore_snapshot("shop", path=where, overwrite=True)
    assert "reload: give the stream a new target" in str(refused.value.hint)
    _, why = engine.inspect_snapshot("shop", path=where)
    assert why is not None
    assert "it begins at seq" in why
    assert len(keeping.rows(tmp_path, "sqlite")) == 39, "nothing was changed"


def test_a_kind_without_a_state_of_its_own_is_refused(tmp_path: Path) -> None:
    stream = spec(tmp_path, "sqlite")
    files = replace(stream.targets[0], kind="files", options={"path": str(tmp_path / "files")})
    keeping.home(tmp_path, replace(stream, targets=(files,)), []).writer.close()
    with pytest.raises(
        NotSupported, match="the state of target log of stream shop cannot be kept: it is of kind files"
    ):
        keeping.create(str(tmp_path))


@pytest.mark.parametrize("remote", [False, True])
def test_files_are_the_same_on_a_disk_and_behind_a_url(tmp_path: Path, remote: bool) -> None:
    there: Files = LocalFiles(tmp_path)
    if remote:
        there = RemoteFiles("s3://bucket/kept", fs.LocalFileSystem(), str(tmp_path))
    assert (there.read("a/b/one"), there.folders("a")) == (None, [])
    there.write("a/b/one", b"1")
    there.write("a/c/two", b"2")
    with there.writing("a/b/large") as file:
        file.write(b"x" * 100)
    assert (there.read("a/b/one"), there.folders("a"), file.bytes) == (b"1", ["b", "c"], 100)
    there.remove("a/b/one")
    there.remove("a/b/one")
    assert there.read("a/b/one") is None
    there.remove_folder("a/b")
    there.remove_folder("a/b")
    assert there.folders("a") == ["c"]
    assert str(open_files(f"file://{tmp_path}").base) == str(tmp_path)


def shop(script: Script, root: Path, *kinds: str, rules: SnapshotRules | None) -> StreamSpec:
    targets = tuple(TargetSpec(kind, kind, QUICK, options={"path": str(root / f"copy.{kind}")}) for kind in kinds)
    source = script.source("main", ("public.*",))
    return StreamSpec("shop", source, Mode.CDC, targets, checkpoint_interval_ms=100, snapshots=rules)


def copied(root: Path, kind: str) -> list[tuple[Any, ...]]:
    if not (root / f"copy.{kind}").exists():
        return []
    place = '"public.orders"' if kind == "sqlite" else "public.orders"
    try:
        return ask(root / f"copy.{kind}", kind, f"SELECT id, note FROM {place} ORDER BY id")
    except (sqlite3.Error, duckdb.Error):
        return []  # not there yet, or written at this moment


def test_while_a_stream_runs_its_targets_are_kept_restored_and_go_on(
    engine: Engine, script: Script, tmp_path: Path, watching: Watching
) -> None:
    stream = shop(script, tmp_path, "sqlite", "duckdb", rules=SnapshotRules(str(tmp_path / "kept")))
    engine.start()
    engine.upsert_stream(stream)
    engine.await_ready("shop", 120)
    (first, *_) = watching.of("delivery.startup")
    assert first.message.startswith("cold start: the target is empty; it begins after seq 0 of the journal; not from")
    assert first.level is Level.INFO
    script.insert("public.orders", id=1, note="one")
    for kind in ("sqlite", "duckdb"):
        await_that(lambda kind=kind: copied(tmp_path, kind) == [(1, "one")])  # type: ignore[misc]

    # A state that is being read does not change, and holds nobody up.
    with open_target(stream.targets[0]).keep("shop", "sqlite") as state:  # type: ignore[attr-defined]
        table = next(state.tables)
        script.insert("public.orders", id=2, note="two")
        await_that(lambda: copied(tmp_path, "sqlite") == [(1, "one"), (2, "two")])
        assert [batch.column("id").to_pylist() for batch in table.batches] == [[1]]
    await_that(lambda: copied(tmp_path, "duckdb") == [(1, "one"), (2, "two")])

    taken = engine.create_snapshot("shop")
    assert [(one.target, one.rows, one.seq) for one in taken] == [("sqlite", 2, 2), ("duckdb", 2, 2)]
    script.insert("public.orders", id=3, note="three")
    for kind in ("sqlite", "duckdb"):
        await_that(lambda kind=kind: len(copied(tmp_path, kind)) == 3)  # type: ignore[misc]

    # One is lost while nothing runs, the other one is taken back while it runs.
    engine.stop()
    for file in tmp_path.glob("copy.duckdb*"):
        file.unlink()
    engine.start()
    await_that(lambda: len(copied(tmp_path, "duckdb")) == 3)
    engine.restore_snapshot("shop", target="sqlite", overwrite=True)

    def paths() -> list[str]:
        return [str((one.startup or {}).get("path")) for one in engine.get_status("shop").targets]

    await_that(lambda: paths() == ["restore", "restore"])
    script.insert("public.orders", id=4, note="four")
    for kind in ("sqlite", "duckdb"):
        await_that(lambda kind=kind: [row[0] for row in copied(tmp_path, kind)] == [1, 2, 3, 4])  # type: ignore[misc]
    engine.await_ready("shop", 120)
    duck = engine.get_status("shop").targets[1]
    assert duck.startup is not None
    assert duck.startup["reason"] == f"the target is empty; snapshot {taken[1].id} is at seq 2"
    assert duck.restore is not None
    assert (duck.restore["state"], duck.snapshot and duck.snapshot["seq"]) == ("done", 2)
    engine.stop()
    engine.start()
    await_that(lambda: paths() == ["resume", "resume"])


def test_a_schedule_keeps_the_newest_and_what_has_not_changed_is_not_kept_again(
    engine: Engine, script: Script, tmp_path: Path
) -> None:
    rules = SnapshotRules(str(tmp_path / "kept"), every_ms=100, keep=2, format="jsonl")
    engine.start()
    engine.upsert_stream(shop(script, tmp_path, "sqlite", rules=rules))
    engine.await_ready("shop", 120)
    for id_ in (1, 2, 3):
        script.insert("public.orders", id=id_, note="row")
        await_that(lambda id_=id_: [one.seq for one in engine.list_snapshots("shop")][-1:] == [id_])  # type: ignore[misc]
    await_that(lambda: [one.seq for one in engine.list_snapshots("shop")] == [2, 3])
    assert {one.format for one in engine.list_snapshots("shop")} == {Format.JSONL}


def test_the_command_does_all_of_it_in_json(tmp_path: Path) -> None:
    stream = spec(tmp_path, "sqlite", automatic=True)
    keeping.home(tmp_path, stream, [[insert("1", "one")]]).writer.close()
    assert keeping.deliver(str(tmp_path), "sqlite", "mirror", True) == 0

    def command(*words: str, code: int = 0) -> Any:
        done = CliRunner().invoke(app, ["snapshot", *words, "--json", "--home", str(tmp_path)])
        assert done.exit_code == code, done.output
        return json.loads(done.stdout) if code == 0 else done.stderr

    (first,) = command("create", "shop")
    (second,) = command("create", "shop", "--target", "log", "--format", "jsonl")
    assert [one["id"] for one in command("list", "shop")] == [first["id"], second["id"]]
    found = command("inspect", "shop", "--check")
    assert (found["id"], found["usable"], found["rows"], found["position"]) == (
        second["id"],
        True,
        1,
        "00000000/00000454",
    )
    said = CliRunner().invoke(app, ["snapshot", "inspect", "shop", "--home", str(tmp_path)]).stdout
    assert "checked: no\nusable: yes\n" in said
    assert "is not empty" in command("restore", "shop", code=1)
    keeping.wipe(tmp_path, "sqlite")
    done = command("restore", "shop", first["id"])
    assert (done["state"], done["seq"]) == ("restored", 1)
    assert keeping.rows(tmp_path, "sqlite") == [(1, "one", 1)]
    assert [one["id"] for one in command("prune", "shop", "--keep", "1")] == [first["id"]]
    assert "nothing says how many" in command("prune", "shop", code=2)
    assert command("delete", "shop", second["id"])["id"] == second["id"]
    assert command("list", "shop") == []
    for words in (["list", "shop"], ["create", "shop"], ["list", "shop"], ["inspect", "shop"]):
        done = CliRunner().invoke(app, ["snapshot", *words, "--home", str(tmp_path)])
        assert done.exit_code == 0, done.output
    assert "public.orders: 1 row," in done.stdout
    assert CliRunner().invoke(app, ["status", "--home", str(tmp_path)]).exit_code == 0
