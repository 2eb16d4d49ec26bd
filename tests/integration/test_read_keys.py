"""Single rows that are read once more: which they are, who wrote them, and what they can show. On a real server."""

from __future__ import annotations

import numpy as np
import pytest

from millstream.errors import SourceHalted, SourceUnavailable
from millstream.model import Op
from millstream.sources import open_source, read_keys
from millstream.sources.base import KeyRows
from millstream.sources.decoders import decoder
from millstream.sources.postgres import keys as single
from tests.fixtures.capture import source_spec
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres

XID = "SELECT pg_current_xact_id()::text::int8"


def read(database: Database, table: str, *keys: str, txids: tuple[int, ...] = ()) -> KeyRows:
    spec = source_spec(database)
    (relation,) = open_source(spec).relations([table])
    return read_keys(spec, relation, ["id"], [(key,) for key in keys], txids)


def values(database: Database, table: str, found: KeyRows) -> list[dict[str, object]]:
    (relation,) = open_source(source_spec(database)).relations([table])
    ops = np.full(len(found.payload), Op.READ, np.uint8)
    rows: list[dict[str, object]] = decoder(relation).decode(ops, found.payload).after.to_pylist()
    return rows


def test_rows_are_named_by_the_transaction_that_wrote_them_unless_a_savepoint_did(database: Database) -> None:
    database.sql("CREATE TABLE item (id int PRIMARY KEY, n int)")
    with database.connect() as connection, connection.transaction():
        ((txid,),) = connection.execute(XID).fetchall()
        connection.execute("INSERT INTO item VALUES (1, 1), (3, 3)")
        with connection.transaction():
            connection.execute("INSERT INTO item VALUES (2, 2)")
    ((end,),) = database.sql("SELECT (pg_current_wal_insert_lsn() - '0/0')::int8")
    found = read(database, "public.item", "3", "2", "1", "4", txids=(txid,))
    assert [row["n"] for row in values(database, "public.item", found)] == [1, 2, 3]
    assert [writer == txid for writer in found.writers] == [True, False, True]
    assert found.until >= end
    database.sql("VACUUM (FREEZE, FULL) item")
    assert read(database, "public.item", "1", "2", "3").writers == found.writers


def test_a_partitioned_table_has_the_rows_of_its_partitions_and_a_parent_only_its_own(database: Database) -> None:
    database.sql(
        """
        CREATE TABLE part (id int PRIMARY KEY, n int) PARTITION BY RANGE (id);
        CREATE TABLE part_1 PARTITION OF part FOR VALUES FROM (0) TO (10);
        CREATE TABLE part_2 PARTITION OF part FOR VALUES FROM (10) TO (20);
        INSERT INTO part VALUES (1, 1), (11, 11);
        CREATE TABLE parent (id int PRIMARY KEY, n int);
        CREATE TABLE child () INHERITS (parent);
        INSERT INTO parent VALUES (1, 1);
        INSERT INTO child VALUES (1, 100), (2, 200);
        """
    )
    found = read(database, "public.part", "1", "11")
    assert [row["n"] for row in values(database, "public.part", found)] == [1, 11]
    assert len(found.writers) == 2
    found = read(database, "public.parent", "1", "2")
    assert [row["n"] for row in values(database, "public.parent", found)] == [1]


def test_rows_are_read_when_a_transaction_of_the_log_is_seen_and_not_before(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a synchronous standby a transaction is in the log for as long as that is waited for, and nobody sees it."""
    database.sql("CREATE TABLE item (id int PRIMARY KEY, n int)")
    with database.connect() as connection:
        with connection.transaction():
            ((txid,),) = connection.execute(XID).fetchall()
            connection.execute("INSERT INTO item VALUES (1, 1)")
            ((later,),) = database.sql(XID)
            monkeypatch.setattr(single, "SEEN_SECONDS", 0.0)
            assert len(read(database, "public.item", "1", txids=(later,)).payload) == 0
            for unseen in (txid, later + 1000):
                with pytest.raises(SourceUnavailable, match="is not to be seen"):
                    read(database, "public.item", "1", txids=(later, unseen))
            monkeypatch.undo()
        assert len(read(database, "public.item", "1", txids=(txid, later)).payload) == 1


def test_a_table_that_is_gone_is_told(database: Database) -> None:
    database.sql("CREATE TABLE item (id int PRIMARY KEY)")
    spec = source_spec(database)
    (relation,) = open_source(spec).relations(["public.item"])
    database.sql("DROP TABLE item")
    with pytest.raises(SourceHalted, match=r"reading rows of public\.item"):
        read_keys(spec, relation, ["id"], [("1",)], ())
