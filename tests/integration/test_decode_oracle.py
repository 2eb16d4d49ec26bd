"""What the server sends through its log besides plain rows decodes to what it means."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from millstream.sources.base import Decoded
from millstream.sources.decoders import decoder, messages
from millstream.sources.postgres.catalog import relations
from tests.fixtures.postgres import Database
from tests.fixtures.type_oracle import changes, decoded, session

pytestmark = pytest.mark.postgres


def run(database: Database, setup: str, slot: str, *statements: str) -> None:
    """Set up, then make the slot, then run statements, each in a transaction of its own."""
    database.sql(setup)
    for statement in (f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')", *statements):
        database.sql(statement)


class Log:
    """What the slot has sent of tables, and the tables' descriptions."""

    def __init__(self, database: Database, slot: str) -> None:
        with session(database) as connection:
            self.relations = {relation.name: relation for relation in relations(connection, ["public.*"])}
            self.changes = [raw for raw in changes(connection, slot) if raw[:1] in (b"I", b"U", b"D")]

    def decoded(self, table: str) -> Decoded:
        relation = self.relations[table]
        oid = relation.oid.to_bytes(4, "big")
        return decoded(relation, [raw for raw in self.changes if raw[1:5] == oid])


def test_a_large_value_that_did_not_change_is_marked(database: Database) -> None:
    run(
        database,
        """
        CREATE TABLE keyed (key bigint PRIMARY KEY, big text, n integer);
        ALTER TABLE keyed ALTER big SET STORAGE EXTERNAL;
        CREATE PUBLICATION trial FOR TABLE keyed;
        """,
        "toast",
        "INSERT INTO keyed VALUES (1, repeat('x', 9000), 1)",
        "UPDATE keyed SET n = 2",
        "UPDATE keyed SET key = 2",
        "ALTER TABLE keyed REPLICA IDENTITY FULL",
        "UPDATE keyed SET n = 3",
    )
    result = Log(database, "toast").decoded("keyed")
    assert result.after["big"].to_pylist() == ["x" * 9000, None, None, None]
    assert result.unchanged.to_pylist() == [[], ["big"], ["big"], ["big"]]
    assert result.before["key"].to_pylist() == [None, None, 1, 2]
    assert result.before["big"].to_pylist() == [None, None, None, "x" * 9000]


def test_logical_messages_are_what_was_emitted(any_database: Database) -> None:
    slot = f"messages_{any_database.name}"
    run(
        any_database,
        "CREATE TABLE keyed (key bigint PRIMARY KEY); CREATE PUBLICATION trial FOR TABLE keyed",
        slot,
        "SELECT pg_logical_emit_message(true, 'audit', 'héllo'), pg_logical_emit_message(false, '', '\\x00ff'::bytea)",
    )
    with session(any_database) as connection:
        raw = [raw for raw in changes(connection, slot) if raw[:1] == b"M"]
    result = decoder(messages("postgres")).decode(
        np.full(len(raw), ord("m"), np.uint8), pa.array(raw, pa.large_binary())
    )
    assert sorted(result.after.to_pylist(), key=lambda row: str(row["prefix"])) == [
        {"prefix": "", "content": b"\0\xff", "transactional": False},
        {"prefix": "audit", "content": "héllo".encode(), "transactional": True},
    ]
