"""Versions of tables: counted from the journal, compared column by column, shown by the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from millstream.cli.app import app
from millstream.engine.home import Home
from millstream.errors import ConfigError, OutOfRange
from millstream.journal import JournalReader
from millstream.model import Column, Relation
from millstream.registry.ddl import policy_of
from millstream.registry.kinds import Kind, Policy
from millstream.registry.structure import Compatibility, compatibility, differences, fingerprint
from millstream.registry.versions import Registry
from tests.fixtures.journals import Journal

INT4, INT8, TEXT = 23, 20, 25


def column(name: str, attnum: int | None, oid: int = TEXT, **facts: Any) -> Column:
    known = {} if attnum is None else {"attnum": attnum, "nullable": True, "generated": False, **facts}
    return Column(name, oid, key=name == "id", **known)


def table(*columns: Column, oid: int = 7001, name: str = "orders", **facts: Any) -> Relation:
    enriched = all(one.attnum is not None for one in columns)
    return Relation(oid, "public", name, "d", columns, ("id",), ("id",), **{"enriched": enriched, **facts})


ID = column("id", 1, INT4, nullable=False)
FIRST = table(ID, column("body", 2))


def changed(before: Relation, after: Relation) -> list[str]:
    return [one.in_words() for one in differences(before, after)]


@pytest.mark.parametrize(
    ("after", "said", "fits"),
    [
        (table(*FIRST.columns, column("note", 3)), ["add_column note: oid 25"], "full"),
        (
            table(*FIRST.columns, column("n", 3, INT4, nullable=False, default="7")),
            ["add_column n: oid 23 default 7"],
            "full",
        ),
        (table(*FIRST.columns, column("n", 3, nullable=False)), ["add_column n: oid 25"], "forward"),
        (table(ID), ["drop_column body: oid 25"], "full"),
        (table(column("id", 1, INT4, nullable=False)), ["drop_column body: oid 25"], "full"),
        (table(ID, column("text", 2)), ["rename_column text: body -> text"], "none"),
        (table(ID, column("body", 3)), ["drop_column body: oid 25", "add_column body: oid 25"], "full"),
        (
            table(column("id", 1, INT8, nullable=False), column("body", 2)),
            ["retype_column id: oid 23 -> oid 20"],
            "backward",
        ),
        (table(ID, column("body", 2, nullable=False)), ["nullability body: null -> not null"], "forward"),
        (table(ID, column("body", 2, default="'x'")), ["default body: none -> 'x'"], "full"),
        (table(*FIRST.columns, oid=7002), ["replace_table: public.orders (7001) -> public.orders (7002)"], "none"),
        (table(*FIRST.columns, name="old"), ["rename_table: public.orders -> public.old"], "none"),
        (replace(FIRST, identity="f"), ["identity: default -> full"], "full"),
        (replace(FIRST, key=("body",)), ["key: id -> body"], "full"),
    ],
)
def test_what_changed_is_told_by_kind(after: Relation, said: list[str], fits: str) -> None:
    assert changed(FIRST, after) == said
    assert compatibility(FIRST, after) is Compatibility(fits)


def test_a_rename_that_only_the_log_tells_is_a_guess() -> None:
    before = table(column("id", None, INT4), column("body", None), column("rest", None))
    renamed = table(column("id", None, INT4), column("text", None), column("rest", None))
    assert changed(before, renamed) == ["rename_column? text: body -> text"]
    retyped = table(column("id", None, INT4), column("text", None, INT4), column("rest", None))
    assert changed(before, retyped) == ["drop_column body: oid 25", "add_column text: oid 23"]


def test_what_is_unknown_has_not_changed() -> None:
    log_only = table(column("id", None, INT4), column("body", None))
    richer = table(ID, column("body", 2, nullable=False, default="'x'"))
    assert changed(log_only, richer) == []
    assert changed(richer, log_only) == []


def test_a_fingerprint_is_of_the_structure_alone() -> None:
    assert len(fingerprint(FIRST)) == 64
    restored = replace(FIRST, oid=9, columns=(replace(ID, attnum=4), replace(FIRST.columns[1], attnum=9)))
    assert fingerprint(restored) == fingerprint(FIRST)
    assert fingerprint(table(FIRST.columns[1], ID)) != fingerprint(FIRST)


SECOND = table(*FIRST.columns, column("note", 3))
LOG_ONLY = table(column("id", None, INT4), column("body", None), column("note", None))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A home whose journal has three versions of public.orders and one of public.items."""
    home = Home(tmp_path / "home").create()
    journal = Journal.create(home.journal_path("shop"))
    items = table(*FIRST.columns, oid=7002, name="items")
    journal.register(items)
    journal.register(FIRST)
    journal.transaction([("public.items", 1, "nut"), ("public.orders", 1, "a")])
    journal.register(SECOND)
    journal.transaction([("public.orders", 2, "b")], extra=("n",))
    journal.register(LOG_ONLY)
    journal.transaction([("public.items", 3, "gear")])
    journal.transaction([("public.orders", 3, "c")], extra=("n",))
    journal.register(FIRST)
    journal.transaction([("public.orders", 4, "d")])
    yield home
    journal.writer.close()


@pytest.fixture
def registry(home: Home) -> Registry:
    return Registry(JournalReader([str(home.journal_path("shop"))]))


def test_versions_are_counted_by_table_and_numbered_over_all(registry: Registry) -> None:
    assert registry.tables() == ["public.items", "public.orders"]
    assert [(one.table, one.version, one.id, one.seq) for one in registry.all()] == [
        ("public.items", 1, 1, 1),
        ("public.orders", 1, 2, 2),
        ("public.orders", 2, 3, 3),
        ("public.orders", 3, 2, 6),
    ]
    latest = registry.versions("public.orders")[-1]
    assert [one.in_words() for one in latest.changes] == ["drop_column note: oid 25"]
    assert latest.fingerprint == registry.version("public.orders", 1).fingerprint


def test_the_version_in_force_is_found_by_seq_position_and_time(registry: Registry) -> None:
    versions = registry.versions("public.orders")
    assert [registry.at_seq("public.orders", seq).version for seq in (2, 3, 4, 5, 6, 99)] == [1, 2, 2, 2, 3, 3]
    for one in versions:
        at = one.checkpoint
        assert registry.at_position("public.orders", at.position) == one
        assert registry.at_time("public.orders", int(at.wall.timestamp() * 1_000_000)) == one
        assert registry.at_seq("public.orders", at.seq + 1 if one.version > 1 else one.seq) == one
    assert registry.at_position("public.orders", versions[2].checkpoint.position - 1).version == 2
    with pytest.raises(OutOfRange, match="first change is seq 2"):
        registry.at_seq("public.orders", 1)


def test_names_that_tables_have_exchanged_are_told_and_wait(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path)
    journal.register(FIRST)
    journal.transaction([("public.orders", 1, "a")])
    journal.register(table(*FIRST.columns, name="orders_old"))
    journal.transaction([("public.orders_old", 2, "b")])
    journal.register(table(*FIRST.columns, oid=7009))
    journal.transaction([("public.orders", 3, "c")])
    found = list(Registry(JournalReader([str(tmp_path)])).all())
    journal.writer.close()
    said = [[(change.kind, change.before, change.after) for change in one.changes] for one in found[1:]]
    oid = FIRST.oid
    assert said == [
        [(Kind.RENAME_TABLE, "public.orders", "public.orders_old")],
        [(Kind.REPLACE_TABLE, f"public.orders ({oid})", "public.orders (7009)")],
    ]
    assert [policy_of(one.changes, {}) for one in found] == [Policy.APPLY, Policy.GATE, Policy.GATE]


def test_a_change_names_its_schema(registry: Registry) -> None:
    assert registry.by_id(3).version == 2
    assert registry.by_id(4).version == 2, "what only the log told is the same version"
    assert registry.by_id(2).version == 3, "where it was in force last"
    with pytest.raises(ConfigError, match="schema 17"):
        registry.by_id(17)


def millstream(home: Home, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["schema", *arguments, "--home", str(home.path)])


def test_the_command_lists_shows_and_compares(home: Home) -> None:
    listed = json.loads(millstream(home, "list", "--json").stdout)
    assert [(one["tenant"], one["source"], one["table"], one["version"]) for one in listed] == [
        ("default", "shop", "public.items", 1),
        ("default", "shop", "public.orders", 1),
        ("default", "shop", "public.orders", 2),
        ("default", "shop", "public.orders", 3),
    ]
    assert listed[2]["checkpoint"]["seq"] == 2
    assert json.loads(millstream(home, "list", "--tenant", "acme", "--json").stdout) == []
    text = millstream(home, "list", "shop", "--table", "public.orders").stdout
    assert "add_column note" in text
    assert "items" not in text
    shown = json.loads(millstream(home, "show", "shop", "public.orders", "--at", "4", "--json").stdout)
    assert [one["name"] for one in shown["structure"]["columns"]] == ["id", "body", "note"]
    assert "note" in millstream(home, "show", "shop", "--id", "3").stdout
    assert "version: 3" in millstream(home, "show", "shop", "public.orders").stdout
    found = json.loads(millstream(home, "diff", "shop", "public.orders", "--from", "1", "--to", "2", "--json").stdout)
    assert found["compatibility"] == "full"
    assert [one["kind"] for one in found["changes"]] == ["add_column"]
    assert "drop_column note" in millstream(home, "diff", "shop", "public.orders").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "shop"), "which schema?"),
        (("show", "shop", "public.orders", "--version", "9"), "it has 1 to 3"),
        (("show", "shop", "public.none"), "it has public.items, public.orders"),
        (("show", "shop", "public.orders", "--at", "noon"), "no place in a journal"),
        (("diff", "shop", "public.items"), "no version before 1"),
    ],
)
def test_wrong_use_is_told(home: Home, arguments: tuple[str, ...], said: str) -> None:
    result = millstream(home, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_schema_that_comes_while_they_are_read_is_no_error(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "journal")
    journal.register(FIRST)
    journal.transaction([("public.orders", 1, "a")])

    class Overtaken(JournalReader):
        def relations(self) -> dict[int, Relation]:
            found = super().relations()
            journal.register(SECOND)
            journal.transaction([("public.orders", 2, "b")], extra=("n",))
            return found

    assert [one.version for one in Registry(Overtaken(journal.locations)).all()] == [1]
    assert [one.version for one in Registry(JournalReader(journal.locations)).all()] == [1, 2]
    journal.writer.close()
