"""Ranges of a table's key: how they are written, and that every way of asking gives one answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from millstream.cli.app import app
from millstream.keyrange import KeyColumn, KeyRange, NotARange, Operand, comparisons, parse

KEY = (
    KeyColumn("id", "id", "integer"),
    KeyColumn("tenant", "tenant", "text"),
    KeyColumn("day", "day", "time"),
    KeyColumn("of", "of", "uuid"),
)


def holds(text: str, **key: object) -> bool:
    condition = parse(text)
    asked = {one.column for one in comparisons(condition)}
    return KeyRange(condition, tuple(column for column in KEY if column.source in asked)).holds(key)


@pytest.mark.parametrize(
    ("text", "within", "outside"),
    [
        ("id = 5", {5}, {4, 6}),
        ("id >= 5 AND id < 7", {5, 6}, {4, 7}),
        ("5 <= id and 7 > id", {5, 6}, {4, 7}),
        ("ID BETWEEN -2 AND 2", {-2, 0, 2}, {-3, 3}),
        ("id NOT BETWEEN 1 AND 3", {0, 4}, {1, 3}),
        ("id IN (1, 3)", {1, 3}, {2}),
        ("NOT id IN (1, 3)", {2}, {1, 3}),
        ("id < 2 OR id > 8 AND id <> 9", {1, 10}, {2, 8, 9}),
        ('("id" < 2 OR id > 8) AND id != 9', {1, 10}, {2, 9}),
    ],
)
def test_rows_are_in_a_range_or_not(text: str, within: set[int], outside: set[int]) -> None:
    assert [id_ for id_ in within if not holds(text, id=id_)] == []
    assert [id_ for id_ in outside if holds(text, id=id_)] == []


def test_text_is_compared_by_its_bytes() -> None:
    assert holds("tenant >= 'Z'", tenant="a")
    assert holds("tenant > 'zz'", tenant="é")
    assert holds("tenant = 'it''s; --?%'", tenant="it's; --?%")
    assert not holds("tenant = 'a'", tenant="A")


def test_dates_are_in_the_order_of_time_however_they_are_written() -> None:
    early = ["-infinity", "4713-01-01 BC", "0044-03-15 12:00:00+00 BC"]
    late = ["infinity", "10000-01-01", "294276-12-31 23:59:59+00"]
    inside = ["2026-01-01", "2026-01-01 00:00:00.5", "2026-01-31"]
    january = "day >= '2026-01-01' AND day < '2026-02-01'"
    assert [day for day in inside if not holds(january, day=day)] == []
    assert [day for day in [*early, *late, "2025-12-31", "2026-02-01"] if holds(january, day=day)] == []
    assert [day for day in early if not holds("day <= '0001-01-01'", day=day)] == []
    assert [day for day in late if not holds("day > '9999-12-31'", day=day)] == []
    assert holds("day > '2026-01-01 00:00:00.45+00'", day="2026-01-01 00:00:00.5+00")
    assert holds("day > '2026-01-01 00:00:00+00'", day="2026-01-01 00:00:00.000001+00")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it ends too early"),
        ("id", "it ends too early"),
        ("id >", "it ends too early"),
        ("id = 1 id", "'id' is not expected there"),
        ("id = other", "'other' is not expected there"),
        ("lower(tenant) = 'a'", "'(' is not expected there"),
        ("id % 2 = 0", "'% 2 = 0' is not understood"),
        ("(id = 1", "it ends too early"),
        ("id NOT = 1", "'=' is not expected there"),
        ("id IN ()", "')' is not expected there"),
        ("AND = 1", "'AND' is not expected there"),
        ("id ( 1", "'(' is not expected there"),
    ],
)
def test_what_is_no_range_is_told_from_one(text: str, said: str) -> None:
    with pytest.raises(NotARange) as wrong:
        parse(text)
    assert str(wrong.value) == said


def test_a_database_that_has_dates_compares_them_itself() -> None:
    within = KeyRange(parse("day < '2026-01-01' AND tenant = 'a'"), KEY)

    def operand(column: KeyColumn) -> Operand:
        own = f'"{column.name}"'
        return Operand(own, textual=False) if column.kind == "time" else Operand(f'{own} COLLATE "C"', indexed=own)

    expected = """("day" < '2026-01-01' AND ("tenant" = 'a' AND "tenant" COLLATE "C" = 'a'))"""
    assert within.sql(operand) == expected


def test_the_command_wants_one_table_with_a_range(tmp_path: Path) -> None:
    for tables in ([], ["--table", "public.a", "--table", "public.b"]):
        done = CliRunner().invoke(app, ["reload", "shop", *tables, "--where", "id = 1", "--home", str(tmp_path)])
        assert done.exit_code == 2
        assert "give one --table with it" in " ".join(done.stderr.replace("│", " ").split())
