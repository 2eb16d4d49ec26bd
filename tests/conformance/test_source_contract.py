"""The contract of a source, held against every implementation: a real database, and a script."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pytest

from millstream.errors import SourceHalted
from millstream.model import Relation, SourceSpec
from millstream.sources import open_source, remove_source
from millstream.sources.base import CAPTURED, Block, Severity, Source, SourceIdentity
from millstream.sources.decoders import decoder
from millstream.testing import Script
from tests.fixtures.capture import SECONDS, patiently, source_spec
from tests.fixtures.postgres import Database

Change = tuple[str, str, int, str | None]
"""op, table, id, note"""


class Case(Protocol):
    """How the suite makes a source, and works with its database."""

    spec: SourceSpec

    def commit(self, changes: Sequence[Change]) -> None:
        """One transaction: c and u with the whole row, d with its key."""

    def end(self) -> int:
        """The end of the log now."""

    def made(self) -> bool:
        """Whether the source keeps something for us."""


@dataclass
class PostgresCase:
    database: Database
    spec: SourceSpec = field(init=False)

    def __post_init__(self) -> None:
        self.spec = source_spec(self.database, "public.*")
        for table in ("orders", "items"):
            self.database.sql(f"CREATE TABLE {table} (id int PRIMARY KEY, note text)")

    def commit(self, changes: Sequence[Change]) -> None:
        texts = {
            "c": "INSERT INTO {table} VALUES ({id}, '{note}')",
            "u": "UPDATE {table} SET note = '{note}' WHERE id = {id}",
            "d": "DELETE FROM {table} WHERE id = {id}",
        }
        done = "; ".join(texts[op].format(table=table, id=id_, note=note) for op, table, id_, note in changes)
        self.database.sql(f"BEGIN; {done}; COMMIT")

    def end(self) -> int:
        ((end,),) = self.database.sql("SELECT (pg_current_wal_flush_lsn() - '0/0')::int8")
        return int(end)

    def made(self) -> bool:
        slots = f"SELECT 1 FROM pg_replication_slots WHERE database = '{self.database.name}'"
        return bool(self.database.sql(f"{slots} UNION ALL SELECT 1 FROM pg_publication"))


@dataclass
class ScriptedCase:
    path: Path
    spec: SourceSpec = field(init=False)

    def __post_init__(self) -> None:
        self.script = Script(self.path)
        self.spec = self.script.source("shop", ("public.*",))
        for table in ("public.orders", "public.items", "private.secrets"):
            self.script.table(table, {"id": "integer", "note": "text"}, key=["id"])

    def commit(self, changes: Sequence[Change]) -> None:
        with self.script.transaction() as transaction:
            for op, table, id_, note in changes:
                name = f"public.{table}"
                if op == "c":
                    transaction.insert(name, id=id_, note=note)
                elif op == "u":
                    transaction.update(name, {"id": id_, "note": note})
                else:
                    transaction.delete(name, id=id_)

    def end(self) -> int:
        return self.script.end

    def made(self) -> bool:
        return self.script.confirmed("shop") is not None


@pytest.fixture(params=["scripted", pytest.param("postgres", marks=pytest.mark.postgres)])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    if request.param == "scripted":
        return ScriptedCase(tmp_path / "script")
    return PostgresCase(request.getfixturevalue("database"))


@dataclass
class Capturing:
    """A source at work, as the capture loop uses it, with a journal that is a list."""

    source: Source
    identity: SourceIdentity
    end: int
    blocks: list[Block] = field(default_factory=list)
    relations: list[Relation] = field(default_factory=list)
    stream: Iterator[Block] | None = None

    def register(self, relation: Relation) -> int:
        if relation not in self.relations:
            self.relations.append(relation)
        return self.relations.index(relation) + 1

    def connect(self) -> None:
        self.identity = patiently(lambda: self.source.check(self.identity, self.end))
        self.stream = self.source.capture(self.end, self.register)

    def step(self) -> Block:
        assert self.stream is not None
        block = next(self.stream)
        if block.rows is not None:
            assert block.rows.schema.equals(CAPTURED)
            self.blocks.append(block)
            self.end = block.rows.column("resume_position")[-1].as_py()
        self.end = max(self.end, block.progress or 0)
        return block

    def until(self, goal: int) -> None:
        deadline = time.monotonic() + SECONDS
        while self.end < goal:
            assert time.monotonic() < deadline, f"captured up to {self.end}, not up to {goal}"
            self.step()

    def rows(self) -> list[dict[str, Any]]:
        """Every row of a table, as it was captured, with its values."""
        found = []
        for block in self.blocks:
            assert block.rows is not None
            for row in block.rows.to_pylist():
                if row["relation"]:
                    found.append({**row, **self._values(row)})
        return found

    def changes(self) -> list[Change]:
        return [(chr(row["op"]), row["table"], row["id"], row["note"]) for row in self.rows()]

    def _values(self, row: dict[str, Any]) -> dict[str, Any]:
        relation = self.relations[row["relation"] - 1]
        payload = pa.array([row["payload"]], pa.large_binary())
        decoded = decoder(relation).decode(np.array([row["op"]], np.uint8), payload)
        assert decoded.after.schema.names == ["id", "note"]
        return {"table": relation.name, **decoded.after.to_pylist()[0]}


@pytest.fixture
def capturing(case: Case) -> Iterator[Capturing]:
    source = open_source(case.spec)
    identity = source.prepare()
    made = Capturing(source, identity, identity.start)
    made.connect()
    yield made
    source.close()
    source.close()
    remove_source(case.spec)


def test_looking_changes_nothing(case: Case) -> None:
    source = open_source(case.spec)
    findings = source.preflight()
    assert [one for one in findings if one.severity is Severity.ERROR] == []
    found = {relation.table: relation for relation in source.relations(["public.*"])}
    assert sorted(found) == ["public.items", "public.orders"]
    orders = found["public.orders"]
    assert ([column.name for column in orders.columns], orders.key) == (["id", "note"], ("id",))
    assert orders.source_kind == source.kind == case.spec.kind
    assert source.relations(["public.ord*"]) == [orders]
    source.close()
    assert not case.made()


def test_a_table_that_is_not_there_is_a_finding(case: Case) -> None:
    source = open_source(replace(case.spec, tables=("public.nothing",)))
    assert any(one.severity is Severity.ERROR for one in source.preflight())
    source.close()


def test_everything_that_commits_after_prepare_comes_in_order(case: Case, capturing: Capturing) -> None:
    assert case.made()
    first = [("c", "orders", 1, "one"), ("c", "items", 1, "thing")]
    second = [("u", "orders", 1, "two"), ("d", "items", 1, None)]
    third = [("c", "orders", number, "many") for number in range(2, 30)]
    for changes in (first, second, third):
        case.commit(changes)  # type: ignore[arg-type]
    capturing.until(case.end())
    assert capturing.changes() == [*first, *second, *third]
    rows = capturing.rows()
    commits = [row["commit_position"] for row in rows]
    assert commits == sorted(commits)
    assert len(set(commits)) == 3
    assert all(row["commit_position"] < row["resume_position"] for row in rows)
    assert [row["tx_index"] for row in rows] == [0, 1, 0, 1, *range(28)]
    for one, other in pairwise(rows):
        if one["commit_position"] != other["commit_position"]:
            assert one["resume_position"] <= other["commit_position"]


def test_a_quiet_source_still_answers_every_100_ms(case: Case, capturing: Capturing) -> None:
    capturing.until(case.end())
    times = []
    for _ in range(10):
        began = time.monotonic()
        assert capturing.step().rows is None
        times.append(time.monotonic() - began)
    # Some of them: a loaded machine may hold up others.
    assert sorted(times)[2] <= 0.5, "the caller must be able to commit and acknowledge"


def test_capture_goes_on_exactly_where_it_stopped(case: Case, capturing: Capturing) -> None:
    case.commit([("c", "orders", 1, "one")])
    case.commit([("c", "orders", 2, "two")])
    capturing.until(case.end())
    capturing.source.close()
    case.commit([("c", "orders", 3, "while nobody looked")])
    capturing.connect()
    capturing.until(case.end())
    assert [id_ for _, _, id_, _ in capturing.changes()] == [1, 2, 3]
    # Again from an earlier end: what ends after it comes once more, what ends at it does not.
    first = capturing.rows()[0]["resume_position"]
    capturing.source.close()
    again = Capturing(capturing.source, capturing.identity, first)
    again.connect()
    again.until(case.end())
    assert [id_ for _, _, id_, _ in again.changes()] == [2, 3]


def test_a_second_prepare_finds_what_the_first_has_made(case: Case, capturing: Capturing) -> None:
    case.commit([("c", "orders", 1, "between")])
    capturing.source.close()
    again = open_source(case.spec)
    identity = patiently(again.prepare)
    assert identity.facts == capturing.identity.facts
    assert identity.start <= case.end()
    found = Capturing(again, identity, identity.start)
    found.connect()
    found.until(case.end())
    assert found.changes() == [("c", "orders", 1, "between")]
    again.close()


def test_what_was_acknowledged_is_not_held_and_never_goes_back(case: Case, capturing: Capturing) -> None:
    case.commit([("c", "orders", 1, "one")])
    capturing.until(case.end())
    end = capturing.end
    capturing.source.ack(end)
    capturing.source.ack(capturing.identity.start)
    deadline = time.monotonic() + SECONDS
    while capturing.source.status()["confirmed"] < end:
        assert time.monotonic() < deadline
        capturing.step()
    assert capturing.source.status()["log_end"] >= end
    capturing.source.close()
    with pytest.raises(SourceHalted):
        patiently(lambda: capturing.source.check(capturing.identity, capturing.identity.start))
    capturing.connect()


def test_a_journal_of_another_database_is_refused(case: Case, capturing: Capturing) -> None:
    capturing.source.close()
    strange = {key: "another" if isinstance(value, str) else value for key, value in capturing.identity.facts.items()}
    with pytest.raises(SourceHalted):
        patiently(lambda: capturing.source.check(replace(capturing.identity, facts=strange), capturing.end))


def test_an_end_beyond_the_log_is_refused(case: Case, capturing: Capturing) -> None:
    capturing.source.close()
    with pytest.raises(SourceHalted):
        patiently(lambda: capturing.source.check(capturing.identity, case.end() + (1 << 40)))


def test_positions_can_be_written(case: Case, capturing: Capturing) -> None:
    texts = {capturing.source.format_position(position) for position in (0, 1, 1 << 40)}
    assert len(texts) == 3


def test_what_was_removed_is_gone_and_may_be_removed_again(case: Case, capturing: Capturing) -> None:
    capturing.source.close()
    remove_source(case.spec)
    remove_source(case.spec)
    assert not case.made()
    with pytest.raises(SourceHalted):
        capturing.source.check(capturing.identity, capturing.end)
