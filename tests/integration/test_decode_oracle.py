"""Postgres is the oracle: what it sends through its log decodes to what it says in a SELECT."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from psycopg import sql

from millstream.model import Column, Relation
from millstream.sources.base import Decoded
from millstream.sources.decoders import decoder, messages
from millstream.sources.postgres.connection import SESSION_SETTINGS
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres

Text = str | None
Connection = psycopg.Connection[tuple[Any, ...]]


def exact(text: str) -> str:
    return text


def truth(text: str) -> bool:
    return {"t": True, "f": False}[text]


def unhex(text: str) -> bytes:
    assert text.startswith("\\x")
    return bytes.fromhex(text[2:])


def number(text: str) -> Any:
    return "NaN" if text == "NaN" else float(text)


PRINTABLE = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
FAR_DATES = ["infinity", "-infinity", "0044-03-15 BC", "4713-01-01 BC", "10000-01-01", "5874897-12-31", "0001-01-01"]
FAR_TIMES = ["infinity", "-infinity", "0044-03-15 01:02:03.5 BC", "294276-12-31 23:59:59.999999", "9999-12-31 23:59:59"]
OBJECTS = st.dictionaries(st.text(PRINTABLE, max_size=4), st.integers() | st.none() | st.booleans(), max_size=3)


def decimals(whole: int, places: int) -> st.SearchStrategy[str]:
    """Numbers with so many digits before and after the point; exact, which sums of Decimals are not."""
    limit = 10 ** (whole + places) - 1
    signs_and_digits = st.integers(-limit, limit).map(lambda number: Decimal(number).as_tuple())
    return signs_and_digits.map(lambda parts: f"{Decimal((parts.sign, parts.digits, -places)):f}")


@dataclass(frozen=True)
class Kind:
    """A column of the trial table: its type, values for it, and how their text reads as a decoded value."""

    declared: str
    values: st.SearchStrategy[str]
    reads: Callable[[str], Any] = exact
    odd: frozenset[str] = frozenset()


def odd(*texts: str) -> frozenset[str]:
    return frozenset(texts)


KINDS: dict[str, Kind] = {
    "i2": Kind("smallint", st.integers(-(2**15), 2**15 - 1).map(str), int),
    "i4": Kind("integer", st.integers(-(2**31), 2**31 - 1).map(str), int),
    "i8": Kind("bigint", st.integers(-(2**63), 2**63 - 1).map(str), int),
    "f4": Kind(
        "real", st.floats(width=32).map(repr), lambda text: number(text) if text == "NaN" else float(np.float32(text))
    ),
    "f8": Kind("double precision", st.floats().map(repr), number),
    "truth": Kind("boolean", st.sampled_from(["t", "f"]), truth),
    "money_like": Kind("numeric(12,2)", decimals(10, 2) | st.just("NaN"), Decimal, odd("NaN")),
    "wide": Kind("numeric(38,10)", decimals(28, 10) | st.just("NaN"), Decimal, odd("NaN")),
    "rounded": Kind("numeric(5,-2)", st.integers(-9_999_900, 9_999_900).map(str), Decimal),
    "tiny": Kind("numeric(3,5)", st.sampled_from(["0.00123", "-0.00999"])),
    "free": Kind("numeric", decimals(40, 20) | st.sampled_from(["NaN", "Infinity", "-Infinity", "1e300", "0.10"])),
    "words": Kind("text", st.text(PRINTABLE, max_size=40)),
    "short": Kind("varchar(20)", st.text(PRINTABLE, max_size=20)),
    "padded": Kind("char(5)", st.text(PRINTABLE, max_size=5)),
    "raw": Kind("bytea", st.binary(max_size=30).map(lambda value: "\\x" + value.hex()), unhex),
    "day": Kind("date", st.dates().map(str) | st.sampled_from(FAR_DATES), date.fromisoformat),
    "at": Kind("timestamp", st.datetimes().map(str) | st.sampled_from(FAR_TIMES), datetime.fromisoformat),
    "at_ms": Kind("timestamp(3)", st.datetimes(max_value=datetime(9999, 1, 1)).map(str), datetime.fromisoformat),  # noqa: DTZ001
    "instant": Kind("timestamptz", st.datetimes().map(str) | st.sampled_from(FAR_TIMES), datetime.fromisoformat),
    "id4": Kind("uuid", st.uuids().map(str)),
    "doc": Kind("json", OBJECTS.map(json.dumps)),
    "docb": Kind("jsonb", OBJECTS.map(lambda value: json.dumps(value, ensure_ascii=False))),
    "mood": Kind("mood", st.sampled_from(["glad", "so so", 'it\'s "bad"'])),
    "domain": Kind("list_price", decimals(7, 3) | st.just("NaN"), Decimal, odd("NaN")),
    "span": Kind("interval", st.sampled_from(["1 year 2 mons -3 days 04:05:06.7", "00:00:00", "-00:00:01"])),
    "clock": Kind("time", st.sampled_from(["24:00:00", "00:00:00.000001"])),
    "list": Kind(
        "integer[]",
        st.sampled_from(["{}", "{1,NULL,3}", "[0:1]={1,2}", "{{1},{2}}"]),
        {"{}": [], "{1,NULL,3}": [1, None, 3]}.__getitem__,
        odd("[0:1]={1,2}", "{{1},{2}}"),
    ),
    "place": Kind("point", st.sampled_from(["(1,2)", "(NaN,-Infinity)"])),
    "net": Kind("inet", st.sampled_from(["10.0.0.1/8", "::1"])),
    "coin": Kind("money", st.sampled_from(["$1.00", "-$2.50"]), lambda text: Decimal(text.replace("$", ""))),
}

SETUP = """
CREATE TYPE mood AS ENUM ('glad', 'so so', 'it''s "bad"');
CREATE DOMAIN price AS numeric(10,3);
CREATE DOMAIN list_price AS price;
CREATE TABLE keyed (key bigint PRIMARY KEY, {columns});
CREATE TABLE whole (key bigint PRIMARY KEY, {columns});
ALTER TABLE whole REPLICA IDENTITY FULL;
CREATE PUBLICATION trial FOR TABLE keyed, whole;
"""


def run(database: Database, setup: str, slot: str, *statements: str) -> None:
    """Set up, then make the slot, then run statements, each in a transaction of its own."""
    database.sql(setup)
    for statement in (f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')", *statements):
        database.sql(statement)


@contextmanager
def session(database: Database, **changed: str) -> Iterator[Connection]:
    """A session with the settings that capture pins, but for the search path and what is `changed`."""
    settings_of_ours = {**SESSION_SETTINGS, "search_path": "public", **changed}
    options = " ".join(f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in settings_of_ours.items())
    with database.connect(options=options) as connection:
        yield connection


class Log:
    """What the slot has sent: raw messages by table, and the tables' descriptions."""

    def __init__(self, connection: Connection, slot: str) -> None:
        self.relations: dict[int, Relation] = {}
        self.changes: dict[str, list[tuple[str, bytes]]] = {}
        self.messages: list[bytes] = []
        query = (
            "SELECT data FROM pg_logical_slot_get_binary_changes("
            f"'{slot}', NULL, NULL, 'proto_version', '1', 'publication_names', 'trial', 'messages', 'true')"
        )
        for (raw,) in connection.cursor(binary=True).execute(query):
            self._take(connection, bytes(raw))

    def _take(self, connection: Connection, raw: bytes) -> None:
        tag = raw[:1]
        if tag == b"R":
            relation = described(connection, raw)
            self.relations[relation.oid] = relation
        elif tag == b"M":
            self.messages.append(raw)
        elif tag in b"IUD":
            table = self.relations[struct.unpack_from(">I", raw, 1)[0]].name
            self.changes.setdefault(table, []).append(({b"I": "c", b"U": "u", b"D": "d"}[tag], raw))

    def decoded(self, table: str) -> Decoded:
        (relation,) = [relation for relation in self.relations.values() if relation.name == table]
        changes = self.changes[table]
        op = np.array([ord(op) for op, _ in changes], np.uint8)
        result = decoder(relation).decode(op, pa.array([raw for _, raw in changes], pa.large_binary()))
        for part in (result.after, result.before, result.unchanged, result.special):
            part.validate(full=True)
        return result


def described(connection: Connection, raw: bytes) -> Relation:
    """A Relation message and what the catalog adds, read in the plainest way."""
    (oid,) = struct.unpack_from(">I", raw, 1)
    schema, name, rest = raw[5:].split(b"\0", 2)
    identity, (count,), rest = chr(rest[0]), struct.unpack_from(">h", rest, 1), rest[3:]
    columns = []
    for _ in range(count):
        column, after = rest[1:].split(b"\0", 1)
        type_oid, modifier = struct.unpack_from(">Ii", after)
        columns.append(enriched(connection, Column(column.decode(), type_oid, modifier, key=rest[0] == 1)))
        rest = after[8:]
    key = ("key",) if any(column.name == "key" for column in columns) else ()
    return Relation(oid, schema.decode(), name.decode(), identity, tuple(columns), key, key, enriched=True)


def enriched(connection: Connection, column: Column) -> Column:
    oid, modifier, domain = column.type_oid, column.type_mod, True
    while domain:
        query = "SELECT typtype = 'd', typbasetype, typtypmod FROM pg_catalog.pg_type WHERE oid = %s"
        domain, base, base_modifier = connection.execute(query, [oid]).fetchone() or (False, 0, -1)
        if domain:
            oid, modifier = base, base_modifier
    if oid == column.type_oid:
        return column
    return replace(column, type_kind="d", base_type_oid=oid, base_type_mod=modifier)


def said(connection: Connection, table: str, names: Sequence[str]) -> list[list[Text]]:
    """Every row as a SELECT says it, in the order of keys: the very text that the server sends."""
    columns = ", ".join(f'"{name}"' for name in names)
    result = connection.pgconn.exec_(f"SELECT {columns} FROM {table} ORDER BY key".encode())
    assert result.status == psycopg.pq.ExecStatus.TUPLES_OK, result.error_message
    raw = [[result.get_value(row, column) for column in range(len(names))] for row in range(result.ntuples)]
    return [[None if value is None else value.decode() for value in row] for row in raw]


def checked(name: str, text: Text, value: Any, special: str | None) -> None:
    """One decoded cell against the server's text."""
    kind = KINDS[name]
    if text is None:
        assert value is None
        assert special is None
    elif text in kind.odd or (kind.declared in FAR and not text[:5].endswith("-")) or text.endswith("BC"):
        assert value is None, name
        assert special == text, name
    else:
        if isinstance(value, float) and math.isnan(value):
            value = "NaN"
        assert value == kind.reads(text), name
        assert special is None, name


FAR = ("date", "timestamp", "timestamptz")

CELLS = st.fixed_dictionaries({name: st.none() | kind.values | kind.values for name, kind in KINDS.items()})


def write(connection: Connection, table: str, rows: Sequence[tuple[int, dict[str, Text]]]) -> None:
    names = sql.SQL(", ").join(map(sql.Identifier, ["key", *KINDS]))
    values = sql.SQL(", ").join(sql.Placeholder() * (len(KINDS) + 1))
    insert = sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(sql.Identifier(table), names, values)
    connection.cursor().executemany(insert, [[str(key), *(row[name] for name in KINDS)] for key, row in rows])


def change(connection: Connection, table: str, key: int, row: dict[str, Text], new_key: int) -> None:
    names = sql.SQL(", ").join(map(sql.Identifier, ["key", *KINDS]))
    values = sql.SQL(", ").join(sql.Placeholder() * (len(KINDS) + 1))
    update = sql.SQL("UPDATE {} SET ({}) = ROW({}) WHERE key = {}").format(sql.Identifier(table), names, values, key)
    connection.execute(update, [str(new_key), *(row[name] for name in KINDS)])


def compare(decoded: Decoded, at: int, texts: Sequence[Text], *, before: bool = False) -> None:
    """A whole decoded row against the server's texts of it (the key first)."""
    row = (decoded.before if before else decoded.after).slice(at, 1).to_pylist()[0]
    special = dict(decoded.special[at].as_py())
    assert str(row["key"]) == texts[0]
    for name, text in zip(KINDS, texts[1:], strict=True):
        checked(name, text, row[name], special.get(f"_ms_before.{name}" if before else name))


def test_every_value_is_what_a_select_says(any_database: Database) -> None:
    slot = f"oracle_{any_database.name}"
    columns = ", ".join(f'"{name}" {kind.declared}' for name, kind in KINDS.items())
    run(any_database, SETUP.format(columns=columns), slot)
    names = ["key", *KINDS]

    # Shrinking through a server takes minutes, and a failure names its column anyhow.
    @settings(
        max_examples=30,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(rows=st.lists(CELLS, min_size=4, max_size=10), others=st.lists(CELLS, min_size=2, max_size=3))
    def trial(rows: list[dict[str, Text]], others: list[dict[str, Text]]) -> None:
        with session(any_database) as connection:
            for table in ("keyed", "whole"):
                connection.execute(f"DELETE FROM {table}".encode())
            Log(connection, slot)
            seen: dict[str, list[list[list[Text]]]] = {}
            for table in ("keyed", "whole"):
                write(connection, table, list(enumerate(rows)))
                seen[table] = [said(connection, table, names)]
                for key, other in enumerate(others):
                    change(connection, table, key, other, 100 + key if key % 2 else key)
                seen[table].append(said(connection, table, names))
                connection.execute(f"DELETE FROM {table} WHERE key >= 3".encode())
            log = Log(connection, slot)
        for table in ("keyed", "whole"):
            judge(log.decoded(table), *seen[table], changed=len(others), whole=table == "whole")

    trial()


def judge(decoded: Decoded, first: list[list[Text]], second: list[list[Text]], changed: int, *, whole: bool) -> None:
    """All inserts, then the updates by old key, then the deletes of keys from 3 on, by place or key."""
    for at, texts in enumerate(first):
        compare(decoded, at, texts)
        assert not decoded.has_before[at]
    later = {texts[0]: texts for texts in second}
    for key in range(changed):
        at = len(first) + key
        moved = key % 2 == 1
        compare(decoded, at, later[str(100 + key if moved else key)])
        assert decoded.has_before[at] == (whole or moved)
        if whole:
            compare(decoded, at, first[key], before=True)
        elif moved:
            assert decoded.before["key"][at].as_py() == key
            assert all(decoded.before[name][at].as_py() is None for name in KINDS)
    deletes = range(len(first) + changed, decoded.after.num_rows)
    gone = [texts for texts in second if int(texts[0] or 0) >= 3]
    assert sorted(str(decoded.after["key"][at].as_py()) for at in deletes) == sorted(texts[0] or "" for texts in gone)
    for at in deletes:
        assert decoded.has_before[at]
        if whole:
            texts = later[str(decoded.after["key"][at].as_py())]
            compare(decoded, at, texts)
            compare(decoded, at, texts, before=True)


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
    with session(database) as connection:
        log = Log(connection, "toast")
    result = log.decoded("keyed")
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
        raw = Log(connection, slot).messages
    result = decoder(messages("postgres")).decode(
        np.full(len(raw), ord("m"), np.uint8), pa.array(raw, pa.large_binary())
    )
    assert sorted(result.after.to_pylist(), key=lambda row: str(row["prefix"])) == [
        {"prefix": "", "content": b"\0\xff", "transactional": False},
        {"prefix": "audit", "content": "héllo".encode(), "transactional": True},
    ]
