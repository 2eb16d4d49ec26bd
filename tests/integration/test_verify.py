"""A running stream compared with its source on real Spark, while others write; differences are found and repaired."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from millstream import Engine, load_streams
from millstream.cli.app import app
from millstream.engine.verify_report import TableVerdict, VerifyReport
from millstream.errors import NotReady, NotSupported, UnknownName
from tests.fixtures.baselines import TABLES, change, write
from tests.fixtures.delivery import Watching
from tests.fixtures.postgres import Database
from tests.integration.test_baseline import writing

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.timeout(300)]

STREAM = """
name: shop
source: {{kind: postgres, uri: "{uri}", tables: ["public.*"], watch_interval: 10m}}
mode: snapshot_then_cdc
targets:
  - {{name: log, kind: files, path: log, format: parquet, batch: {{max_ms: 2s}}}}
  - {{name: copy, kind: sqlite, path: copy.db, batch: {{max_ms: 2s}}}}
"""


def plant(copy: Path) -> None:
    """A row that is gone, one that is another (and says that it is newer than anything), one too many."""
    with closing(sqlite3.connect(copy)) as db:
        db.execute('DELETE FROM "public.item" WHERE id = 1')
        db.execute("""UPDATE "public.item" SET note = 'planted', _ms_seq = 1 << 40 WHERE id = 2""")
        db.execute('INSERT INTO "public.item" (id, _ms_seq) VALUES (777777, 1)')
        db.commit()


def rewrite_a_file(log: Path) -> None:
    """One value of one change is another."""
    for path in (log / "public.parts").glob("*.parquet"):
        rows = pq.read_table(path, partitioning=None)
        note = pc.if_else(pc.equal(rows["id"], 299), pa.scalar("planted"), rows["note"])
        pq.write_table(rows.set_column(rows.column_names.index("note"), rows.schema.field("note"), note), path)


def of(report: VerifyReport, target: str) -> dict[str, TableVerdict]:
    (found,) = [one for one in report.targets if one.target == target]
    return {table.table: table for table in found.tables}


def asked(home: Path, *words: str) -> tuple[int, VerifyReport]:
    """`millstream verify` beside the process that runs the home."""
    done = CliRunner().invoke(app, ["verify", "shop", *words, "--json", "--home", str(home)])
    return done.exit_code, VerifyReport.from_json(json.loads(done.stdout))


def test_a_stream_that_runs_is_compared_and_repaired_while_others_write(
    tmp_path: Path, database: Database, spark: SparkSession
) -> None:
    database.sql(TABLES)
    write(database, 1, 300)
    (tmp_path / "shop.yaml").write_text(STREAM.format(uri=database.uri))
    watching = Watching()
    with Engine(tmp_path / "home", observer=watching) as engine:
        engine.upsert_streams(load_streams([tmp_path / "shop.yaml"]))
        engine.await_ready("shop", 120)
        with writing(database, pause=0.3):
            change(database, 1, 150)
            write(database, 301, 400)
            database.sql("CREATE TABLE fresh (id int PRIMARY KEY); INSERT INTO fresh VALUES (1)")
            report = engine.verify("shop")
            assert [one.uncaptured for one in report.targets] == [("public.fresh",)] * 2
            with pytest.raises(UnknownName, match=r"the stream does not have public\.fresh yet"):
                engine.verify("shop", "log", tables=["public.fresh"])
            assert [(one.target, one.equal) for one in report.targets] == [("log", True), ("copy", True)]
            assert of(report, "log")["public.keyless"].source_rows == 400
            plant(tmp_path / "copy.db")
            code, repaired = asked(tmp_path / "home", "--target", "copy", "--table", "public.item", "--repair")
            item = of(repaired, "copy")["public.item"]
            assert (code, item.missing, item.changed, item.extra, item.repaired) == (0, 1, 1, 1, True)
            assert item.keys == ('{"id":1}', '{"id":2}', '{"id":777777}')
            database.sql("UPDATE item SET note = 'later' WHERE id = 2")
        rewrite_a_file(tmp_path / "log")
        code, wrong = asked(tmp_path / "home", "--target", "log", "--table", "public.parts")
        (parts,) = of(wrong, "log").values()
        assert (code, parts.missing, parts.changed, parts.extra) == (1, 0, 1, 0)
        assert parts.keys == ('{"id":299,"region":2}',)
        with pytest.raises(NotSupported, match="target log keeps what has happened"):
            engine.verify("shop", "log", repair=True)
        engine.pause("shop", "copy")
        with pytest.raises(NotReady, match="target copy of stream shop is paused"):
            engine.verify("shop", "copy")
        verified = {target.name: target.verified for target in engine.get_status("shop").targets}
    assert [found and found["equal"] for found in verified.values()] == [False, True]
    database.sql("INSERT INTO nothing VALUES (1)")
    code, alone = asked(tmp_path / "home", "--target", "log", "--table", "public.nothing")
    assert (code, [(table.source_rows, table.equal) for table in of(alone, "log").values()]) == (0, [(1, True)])
    with closing(sqlite3.connect(tmp_path / "copy.db")) as db:
        held = db.execute('SELECT id, note, flag FROM "public.item" WHERE id < 400 AND id > 0 ORDER BY id').fetchall()
    assert held == database.sql("SELECT id, note, flag::int FROM item WHERE id < 400 AND id > 0 ORDER BY id")
    kinds = [event.kind for event in watching.events if event.kind.startswith("verify.")]
    assert kinds == ["verify.equal", "verify.equal", "verify.repaired", "verify.different"]
