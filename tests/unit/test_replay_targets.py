"""Delivering once more to every kind of target: mirrors get what they lack, changelogs get all of it, marked."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pytest
from deltalake import DeltaTable
from typer.testing import CliRunner

from millstream import BatchLimits, Engine, Mode, StreamSpec, TargetSpec
from millstream.cli.app import app
from millstream.errors import ConfigError, NotSupported, OutOfRange
from millstream.testing import Script
from tests.fixtures.engines import await_that

FEW = BatchLimits(max_ms=0, max_bytes=1 << 30, max_events=3)

LEFT = [(1, "one"), (2, "two again"), (5, "after"), (7, "moved")]
"""What the history leaves: see `write`."""
CHANGES = 12


def write(script: Script) -> None:
    """Rows that stay, change, go, move, and one that was there before a truncate."""
    script.insert("public.orders", id=9, note="truncated")
    with script.transaction() as changes:
        changes.truncate("public.orders")
    for id_, note in ((1, "one"), (2, "two"), (3, "gone"), (4, "moves")):
        script.insert("public.orders", id=id_, note=note)
    with script.transaction() as changes:
        changes.update("public.orders", {"id": 2, "note": "two again"})
    with script.transaction() as changes:
        changes.delete("public.orders", id=3)
    with script.transaction() as changes:
        changes.delete("public.orders", id=4)
        changes.insert("public.orders", id=7, note="moved")
    script.insert("public.orders", id=5, note="after")
    script.insert("public.items", id=1, note="an item")


def stream(script: Script, root: Path, **targets: tuple[str, dict[str, Any]]) -> StreamSpec:
    specs = tuple(
        TargetSpec(name, kind, FEW, options={"path": str(root / name), **options})
        for name, (kind, options) in targets.items()
    )
    return StreamSpec("shop", script.source("main", ("public.*",)), Mode.CDC, specs, checkpoint_interval_ms=100)


def deliver(engine: Engine, script: Script, wanted: StreamSpec) -> None:
    engine.start()
    engine.upsert_stream(wanted)
    engine.await_ready("shop", 120)
    write(script)
    await_that(lambda: all(one.seq == CHANGES for one in engine.get_status("shop").targets))


def replayed(engine: Engine, *targets: str) -> None:
    """Wait until the targets' replays are over."""

    def over() -> bool:
        mine = [one for one in engine.get_status("shop").targets if one.name in targets]
        assert not [one for one in mine if one.replay and one.replay["error"]]
        return all(one.replay is not None and one.replay["state"] == "done" for one in mine)

    await_that(over)


def rows(kind: str, path: Path, table: str = "public.orders", columns: str = "id, note") -> list[tuple[Any, ...]]:
    wanted = f"SELECT {columns} FROM {{}} ORDER BY 1, 2"
    if kind == "sqlite":
        with closing(sqlite3.connect(path)) as lite:
            return lite.execute(wanted.format(f'"{table}"')).fetchall()
    if kind == "duckdb":
        with duckdb.connect(path) as duck:
            return duck.execute(wanted.format(table)).fetchall()
    held = DeltaTable(str(path / table)).to_pyarrow_table(columns=columns.split(", "))
    return sorted(
        zip(*(held[name].to_pylist() for name in held.column_names), strict=True), key=lambda row: (row[0], repr(row))
    )


MIRRORS = {"lite": ("sqlite", {}), "duck": ("duckdb", {}), "lake": ("delta", {})}


def versioned(root: Path) -> dict[str, list[tuple[Any, ...]]]:
    """What the mirrors hold, with the versions of the rows."""
    return {name: rows(kind, root / name, columns="id, note, _ms_seq") for name, (kind, _) in MIRRORS.items()}


def test_an_intact_mirror_is_not_touched_and_a_damaged_one_is_repaired(
    engine: Engine, script: Script, tmp_path: Path
) -> None:
    deliver(engine, script, stream(script, tmp_path, **MIRRORS))
    engine.pause("shop")
    with closing(sqlite3.connect(tmp_path / "lite")) as lite:
        lite.execute("CREATE TABLE seen (id, op)")
        for op in ("INSERT", "UPDATE"):
            seen = f"INSERT INTO seen VALUES (NEW.id, '{op}')"
            lite.execute(f'CREATE TRIGGER saw_{op} AFTER {op} ON "public.orders" BEGIN {seen}; END')
        lite.commit()
    before = versioned(tmp_path)
    assert [[row[:2] for row in held] for held in before.values()] == [LEFT] * 3
    versions = DeltaTable(str(tmp_path / "lake" / "public.orders")).version()
    engine.replay("shop", 1)
    engine.resume("shop")
    replayed(engine, *MIRRORS)
    epochs = [one.epoch for one in engine.get_status("shop").targets]
    assert epochs == [2, 2, 2]
    engine.stop()
    assert versioned(tmp_path) == before
    assert rows("sqlite", tmp_path / "lite", "seen", "id, op") == [], "not even for a moment"
    assert DeltaTable(str(tmp_path / "lake" / "public.orders")).version() == versions
    with closing(sqlite3.connect(tmp_path / "lite")) as lite, duckdb.connect(tmp_path / "duck") as duck:
        assert lite.execute("SELECT count(*) FROM _millstream_tombstones").fetchall() == [(0,)]
        lite.execute('DELETE FROM "public.orders" WHERE id IN (1, 7)')
        lite.execute("INSERT INTO \"public.orders\" (id, note, _ms_seq) VALUES (4, 'should not be', 1)")
        lite.commit()
        duck.execute("DELETE FROM public.orders WHERE id IN (2, 5)")
    DeltaTable(str(tmp_path / "lake" / "public.orders")).delete("id < 3")
    engine.replay("shop", 1, tables=["public.orders"])
    engine.start()
    replayed(engine, *MIRRORS)
    engine.stop()
    assert versioned(tmp_path) == before
    assert rows("sqlite", tmp_path / "lite", "seen", "id, op") == [(1, "INSERT"), (4, "INSERT"), (7, "INSERT")]
    assert not (tmp_path / "lake" / "_millstream" / "tombstones").exists()


LOGS = {name: (kind, {"write": "changelog"}) for name, (kind, _) in MIRRORS.items()}


def test_a_changelog_gets_its_changes_again_with_the_epoch_beside_them(
    engine: Engine, script: Script, tmp_path: Path
) -> None:
    deliver(engine, script, stream(script, tmp_path, **LOGS))
    engine.stop()
    first = {name: rows(kind, tmp_path / name, columns="_ms_seq, id, note") for name, (kind, _) in LOGS.items()}
    engine.replay("shop", 4, until=8, tables=["public.orders"])
    engine.start()
    replayed(engine, *LOGS)
    script.insert("public.orders", id=6, note="later")
    await_that(lambda: all(one.seq == CHANGES + 1 for one in engine.get_status("shop").targets))
    for one in engine.get_status("shop").targets:
        assert one.replay is not None
        assert (one.replay["from_seq"], one.replay["until_seq"], one.replay["events"]) == (3, 8, 5)
        assert (one.replay["epoch"], one.replay["progress"]) == (2, 1.0)
    engine.stop()
    for name, (kind, _) in LOGS.items():
        held = rows(kind, tmp_path / name, columns="_ms_seq, id, note, _ms_epoch")
        assert [row[:3] for row in held if row[3] is None] == [*first[name], (CHANGES + 1, 6, "later")]
        assert [row[:3] for row in held if row[3] == 2] == [row for row in first[name] if 4 <= row[0] <= 8]
        assert len(rows(kind, tmp_path / name, "public.items")) == 1


def test_what_cannot_be_replayed_is_refused_before_anything_is_changed(
    engine: Engine, script: Script, tmp_path: Path
) -> None:
    wanted = stream(script, tmp_path, lite=("sqlite", {}))
    deliver(engine, script, wanted)
    for wrong, said in (
        ({"until": 5}, "is a mirror, which has one state"),
        ({"tables": ["public.order"]}, "did you mean public.orders"),
    ):
        with pytest.raises((NotSupported, ConfigError), match=said):
            engine.replay("shop", 1, **wrong)  # type: ignore[arg-type]
    with pytest.raises(OutOfRange, match="is beyond the journal's end"):
        engine.replay("shop", 1000)
    with pytest.raises(OutOfRange, match="before the beginning of the journal"):
        engine.replay("shop", datetime(2020, 1, 1, tzinfo=UTC))
    assert engine.get_status("shop").targets[0].replay is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give one of --from-position"),
        (["--from-seq", "1", "--from-time", "2026-01-31"], "give one of --from-position"),
        (["--from-checkpoint", "12"], "a checkpoint looks like"),
        (["--from-time", "yesterday"], "'yesterday' is no time"),
        (["--from-seq", "1", "--until", "tomorrow"], "'tomorrow' is no time"),
    ],
)
def test_the_command_says_what_it_wants(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["replay", "shop", *arguments, "--home", str(tmp_path)])
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.replace("│", " ").split())
