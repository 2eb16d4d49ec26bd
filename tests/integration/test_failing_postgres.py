"""A target database that dies, refuses, loses a table or has no room: clear, alone, and nothing missing afterwards."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from millstream import Engine, Mode, StreamSpec, StreamState, TargetSpec, TargetStatus
from millstream.embedded import EmbeddedPostgres
from tests.fixtures.capture import source_spec
from tests.fixtures.delivery import hardly_wait
from tests.fixtures.disks import mounted
from tests.fixtures.engines import QUICK, await_that
from tests.fixtures.postgres import Database, once_free, short_lived

pytestmark = pytest.mark.postgres

ITEMS = "SELECT id, note FROM item ORDER BY id"


@pytest.fixture(scope="module")
def other() -> Iterator[EmbeddedPostgres]:
    """The target's own server, which the tests may kill."""
    with short_lived(18) as server:
        Database(server, "postgres").sql("CREATE ROLE writer LOGIN")
        yield server


class Shop:
    """A stream into a database that fails in many ways, and into a file that does not."""

    def __init__(self, engine: Engine, source: Database, copy: Database, root: Path) -> None:
        self.engine, self.source, self.copy, self.file = engine, source, copy, root / "other.db"
        self.rows = 0

    def start(self) -> None:
        self.source.sql("CREATE TABLE item (id int PRIMARY KEY, note text)")
        spec = source_spec(self.source, "public.item", options={"slot": f"millstream_{self.source.name}"})
        uri = self.copy.server.uri(self.copy.name, "writer")
        targets = (
            TargetSpec("copy", "postgres", QUICK, options={"uri": uri}),
            TargetSpec("other", "sqlite", QUICK, options={"path": str(self.file)}),
        )
        self.engine.start()
        self.engine.upsert_stream(StreamSpec("shop", spec, Mode.CDC, targets, checkpoint_interval_ms=100))
        self.engine.await_ready("shop", 120)

    def write(self, count: int = 100) -> None:
        self.source.sql(f"INSERT INTO item SELECT {self.rows} + i, repeat('n', 200) FROM generate_series(1, {count}) i")
        self.source.sql(f"UPDATE item SET note = 'changed at {self.rows}' WHERE id % 7 = 0")
        self.rows += count

    def target(self) -> TargetStatus:
        return self.engine.get_status("shop").targets[0]

    def others_flow(self) -> None:
        """The other target gets what the first one does not."""
        whole = self.source.sql(ITEMS)
        await_that(lambda: self.seen() == whole)
        assert self.copy_rows() != whole

    def seen(self) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.file)) as db:
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'public.item'").fetchall():
                return []  # the copy was quicker
            return db.execute('SELECT id, note FROM "public.item" ORDER BY id').fetchall()

    def copy_rows(self) -> list[tuple[Any, ...]]:
        if not self.copy.server.running:
            return []
        if self.copy.sql("SELECT to_regclass('public.item') IS NULL") == [(True,)]:
            return []
        return self.copy.sql(ITEMS)

    def equal(self) -> None:
        """All is well again, and the copy is the table."""
        whole = self.source.sql(ITEMS)
        await_that(lambda: self.copy_rows() == whole)
        await_that(lambda: self.engine.get_status("shop").healthy)

    def fails(self, what: str) -> None:
        await_that(lambda: self.target().state is StreamState.FAILED)
        assert what in (self.target().error or "")
        assert "changed at" not in (self.target().error or ""), "no value of a row is told"


@pytest.fixture
def shop(
    engine: Engine, database: Database, other: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Shop]:
    hardly_wait(monkeypatch)
    name = f"copy_{database.name}"
    maintenance = Database(other, "postgres")
    maintenance.sql(f"CREATE DATABASE {name} OWNER writer")
    made = Shop(engine, database, Database(other, name), tmp_path)
    made.start()
    yield made
    engine.stop()
    once_free(maintenance, f"DROP DATABASE {name} WITH (FORCE)")


def retried(shop: Shop) -> None:
    await_that(lambda: shop.target().retrying is not None)
    assert shop.target().error is None


def test_a_server_that_is_killed_or_takes_nobody_for_a_while_is_waited_for(shop: Shop) -> None:
    shop.write()
    shop.equal()
    shop.copy.server.kill()
    shop.write()
    retried(shop)
    shop.others_flow()
    shop.copy.server.start()
    shop.equal()
    shop.copy.sql(f"ALTER DATABASE {shop.copy.name} CONNECTION LIMIT 0")
    shop.copy.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'writer'")
    shop.write()
    retried(shop)
    shop.others_flow()
    shop.copy.sql(f"ALTER DATABASE {shop.copy.name} CONNECTION LIMIT -1")
    shop.equal()


def test_a_right_or_a_table_that_is_gone_stops_the_target_alone_until_it_is_back(shop: Shop) -> None:
    shop.write()
    shop.equal()
    taken: list[tuple[str, str, str]] = [
        ("REVOKE ALL ON item FROM writer", "GRANT ALL ON item TO writer", "permission denied"),
        ("ALTER TABLE item RENAME TO away", "ALTER TABLE away RENAME TO item", "was dropped"),
    ]
    for take, give_back, what in taken:
        shop.copy.sql(take)
        shop.write()
        shop.fails(what)
        shop.others_flow()
        shop.copy.sql(give_back)
        shop.engine.resume("shop", "copy")
        shop.equal()


def test_a_database_without_room_is_waited_for(shop: Shop) -> None:
    shop.write()
    shop.equal()
    where = shop.copy.server.data_dir.parent / "small"
    with mounted(where, "2m") as disk:
        owner = shop.copy.server.data_dir.stat()
        os.chown(where, owner.st_uid, owner.st_gid)
        shop.copy.sql(f"CREATE TABLESPACE small LOCATION '{where}'")
        shop.copy.sql("ALTER TABLE item SET TABLESPACE small")
        shop.write(20_000)
        retried(shop)
        await_that(lambda: "DiskFull" in (shop.target().retrying or ""))
        shop.others_flow()
        disk.resize("64m")
        shop.equal()
        shop.copy.sql("ALTER TABLE item SET TABLESPACE pg_default")
        shop.copy.sql("DROP TABLESPACE small")
