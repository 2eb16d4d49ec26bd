"""Tables of which a snapshot could easily read too much or too little: by content."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from psycopg.conninfo import conninfo_to_dict

from millstream.errors import SourceHalted
from millstream.model import Op, SourceSpec
from millstream.sources import read_chunk, take_snapshot
from millstream.sources.decoders import decoder
from millstream.sources.postgres import early
from millstream.sources.postgres.chunks import described
from millstream.sources.postgres.connection import command, connect, connect_session
from millstream.sources.postgres.options import PostgresOptions
from millstream.sources.postgres.session import Session
from tests.fixtures.capture import source_spec
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres


@pytest.fixture(params=["with the snapshot", "by tasks"])
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tables are read with the snapshot; all others later, in chunks."""
    if request.param == "by tasks":
        monkeypatch.setattr(early, "TABLE_BYTES", -1)


def rows_read(spec: SourceSpec) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of each table as a copy gets them."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    with closing(take_snapshot(spec, lambda _: None, captured=False)) as taken:
        for chunk in taken.plan.chunks:
            rows = found.setdefault(chunk.relation.name, [])
            payload = list(read_chunk(spec, taken.plan, chunk))
            raw = pa.concat_arrays(payload) if payload else pa.array([], pa.large_binary())
            decoded = decoder(chunk.relation).decode(np.full(len(raw), Op.READ, np.uint8), raw)
            rows += [tuple(row.values()) for row in decoded.after.to_pylist()]
    return {name: sorted(rows, key=str) for name, rows in found.items()}


@pytest.mark.usefixtures("reading")
def test_a_table_with_children_has_its_own_rows_alone(database: Database) -> None:
    database.sql("CREATE TABLE parent (id int, note text); CREATE TABLE child (more int) INHERITS (parent)")
    database.sql("INSERT INTO parent VALUES (1, 'parent'); INSERT INTO child VALUES (2, 'child', 20)")
    assert rows_read(source_spec(database)) == {"parent": [(1, "parent")], "child": [(2, "child", 20)]}


@pytest.fixture
def role(database: Database) -> Iterator[str]:
    name = f"role_{database.name}"
    database.sql(f"CREATE ROLE {name} LOGIN REPLICATION")
    yield name
    database.sql(f"DROP OWNED BY {name}; DROP ROLE {name}")


@pytest.mark.usefixtures("reading")
def test_a_table_whose_rows_are_hidden_from_us_is_an_error_and_never_a_part_of_it(
    database: Database, role: str
) -> None:
    database.sql(f"CREATE TABLE secured (id int, owner text); GRANT SELECT ON secured TO {role}")
    database.sql("ALTER TABLE secured ENABLE ROW LEVEL SECURITY")
    database.sql("CREATE POLICY own ON secured USING (owner = current_user)")
    database.sql(f"INSERT INTO secured VALUES (1, '{role}'), (2, 'somebody else')")
    spec = source_spec(database)
    assert rows_read(spec) == {"secured": [(1, role), (2, "somebody else")]}, "its owner sees all"
    user = conninfo_to_dict(database.uri)["user"]
    theirs = replace(spec, uri=database.uri.replace(f"{user}@", f"{role}@", 1))
    assert theirs.uri != spec.uri
    with pytest.raises(SourceHalted, match="row-level security") as refused:
        rows_read(theirs)
    assert "BYPASSRLS" in (refused.value.hint or "")


def test_a_table_that_somebody_holds_just_now_is_read_later_and_nobody_waits(database: Database) -> None:
    database.sql("CREATE TABLE held (id int); CREATE TABLE free (id int)")
    database.sql("INSERT INTO held VALUES (1); INSERT INTO free VALUES (2)")
    spec = source_spec(database)
    options = PostgresOptions.of(spec)
    with connect(spec, options) as control, closing(Session(connect_session(spec, options))) as session:
        tables = early.EarlyTables(control, session, *described(control, spec, options, None, None))
        command(session.connection, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        with database.connect(autocommit=False) as other:
            other.execute("LOCK TABLE held IN ACCESS EXCLUSIVE MODE")
            tables.lock()
            tables.read()
    assert [chunk.relation.name for chunk, _ in tables._read.values()] == ["free"]


@pytest.mark.usefixtures("reading")
def test_a_table_of_as_many_columns_as_there_can_be_and_one_without_rows(database: Database) -> None:
    widest = 1600
    database.sql(f"CREATE TABLE widest ({', '.join(f'c{n} int' for n in range(widest))}); CREATE TABLE bare (id int)")
    rows = [tuple(range(widest)), tuple(None if n % 7 else -n for n in range(widest))]
    for row in rows:
        database.sql(f"INSERT INTO widest VALUES ({', '.join('NULL' if n is None else str(n) for n in row)})")
    found = rows_read(source_spec(database))
    assert sorted(found["widest"], key=lambda row: row[1] is None) == rows
    assert found.get("bare", []) == []
