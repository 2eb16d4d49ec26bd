"""The table of types has every type that a server of each version has, as the server describes it."""

from __future__ import annotations

import pytest

from millstream.model import Column
from millstream.sources.postgres.inline import always_sent
from millstream.sources.postgres.types import BY_ARRAY_OID, TYPES
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres

CATALOG = """
SELECT oid::int8, typarray::int8, typname, typdelim FROM pg_type
WHERE typnamespace = 'pg_catalog'::regnamespace AND typtype IN ('b', 'r', 'm', 'e') AND typelem NOT IN (
    SELECT e.oid FROM pg_type e WHERE e.typarray = pg_type.oid)
"""


def test_no_built_in_type_is_missing(any_database: Database) -> None:
    there = {name: (oid, array, delimiter) for oid, array, name, delimiter in any_database.sql(CATALOG)}
    ours = {entry.name: (entry.oid, entry.array, entry.delimiter) for entry in TYPES}
    assert ours == there
    assert len(ours) == len(TYPES)


def test_the_arrays_are_the_servers_arrays(any_database: Database) -> None:
    query = "SELECT oid::int8, typdelim FROM pg_type WHERE typnamespace = 'pg_catalog'::regnamespace AND typtype = 'b'"
    delimiters = dict(any_database.sql(query))
    assert {oid: entry.delimiter for oid, entry in BY_ARRAY_OID.items()} == {
        oid: delimiters[oid] for oid in BY_ARRAY_OID
    }


def test_types_that_are_always_sent_are_those_of_a_fixed_length_on_the_server(any_database: Database) -> None:
    lengths = dict(any_database.sql("SELECT oid::int8, typlen::int4 FROM pg_type"))
    sent = {entry.name for entry in TYPES if always_sent(Column("it", entry.oid))}
    fixed = {entry.name for entry in TYPES if lengths[entry.oid] > 0}
    assert sent == fixed | {"inet", "cidr", "int4range", "daterange"}, "the longest of these take at most 24 bytes"
