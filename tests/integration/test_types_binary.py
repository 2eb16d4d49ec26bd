"""Values that travel in binary form become the very columns that their text becomes."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Sequence

import pyarrow as pa
import pytest

from millstream.model import Column, Relation
from millstream.sources.base import Decoded
from millstream.sources.postgres.catalog import relations
from millstream.sources.postgres.types import TYPES, column_types
from millstream.sources.postgres.wire import NOT_READ, refusal, refusals
from tests.fixtures.postgres import Database
from tests.fixtures.type_matrix import TypeMatrix
from tests.fixtures.type_oracle import (
    TABLES,
    Trial,
    as_chosen,
    available,
    changes,
    chosen,
    chosen_kinds,
    decoded,
    session,
)
from tests.fixtures.typed_values import KINDS, Kind

pytestmark = pytest.mark.postgres

ROWS = int(os.environ.get("MILLSTREAM_TYPE_ROWS", "40"))
BUILT_IN = {entry.name for entry in TYPES if entry.becomes.binary is not None}


def binary_kinds(database: Database) -> list[Kind]:
    """Every kind whose binary form is read, plain and as an array."""
    known = BUILT_IN - {"char"} if database.server.version < 16 else BUILT_IN
    kinds = [kind for kind in available(database, KINDS) if kind.name.split("(")[0] in known]
    return [*kinds, *(kind.array() for kind in kinds)]


def assert_same(text: Decoded, binary: Decoded) -> None:
    """Equal to the bit. (Arrow's `equals` takes 0 for -0, and no NaN for another; their bytes decide.)"""
    assert binary.special.to_pylist() == text.special.to_pylist()
    assert binary.unchanged.equals(text.unchanged)
    assert binary.has_before.tolist() == text.has_before.tolist()
    for name in ("after", "before"):
        one, other = getattr(text, name), getattr(binary, name)
        assert other.schema == one.schema
        for column in one.schema.names:
            assert bits(other[column]) == bits(one[column]), column


def bits(column: pa.Array) -> list[object]:
    """The values of a column, floats as their bytes."""
    kind = column.type.value_type if pa.types.is_list(column.type) else column.type
    if not pa.types.is_floating(kind):
        values: list[object] = column.to_pylist()
        return values
    form = "f" if kind == pa.float32() else "d"
    return [_packed(value, form) for value in column.to_pylist()]


def _packed(value: object, form: str) -> object:
    if isinstance(value, list):
        return [_packed(each, form) for each in value]
    return struct.pack(form, value) if isinstance(value, float) and value == value else repr(value)


def both_forms(database: Database, table: str, *statements: str) -> tuple[Relation, list[bytes], list[bytes]]:
    """What two slots send of a table that exists already while the statements run: as text, and in binary form."""
    database.sql(f"CREATE PUBLICATION trial FOR TABLE public.{table}")
    with session(database) as connection:
        for form in ("text", "binary"):
            connection.execute(f"SELECT pg_create_logical_replication_slot('{form}_{database.name}', 'pgoutput')")
        for statement in statements:
            connection.execute(statement.encode())
        (relation,) = relations(connection, [f"public.{table}"])
        text, binary = (
            [raw for raw in changes(connection, f"{form}_{database.name}", **options) if raw[:1] in (b"I", b"U", b"D")]
            for form, options in (("text", {}), ("binary", {"binary": "true"}))
        )
    return relation, text, binary


def test_every_type_gives_the_same_columns_in_both_forms(any_database: Database, type_matrix: TypeMatrix) -> None:
    if any_database.server.version < 18 and "MILLSTREAM_TYPE_ROWS" not in os.environ:
        pytest.skip("older servers take half a minute more: `make types` runs it")
    trial = Trial(any_database, binary_kinds(any_database), ROWS, binary=True)
    assert trial.binary is not None
    for table in TABLES:
        relation = trial.relations[table]
        assert refusals(relation, any_database.server.version * 10_000) == []
        assert all(raw.count(b"b\0\0\0") for raw in trial.binary[table])
        for asked in (relation, chosen(relation)):
            assert_same(decoded(asked, trial.messages[table]), decoded(asked, trial.binary[table]))
    for kind in trial.kinds:
        type_matrix.passed(kind.name, "binary", any_database.server.version)
    for kind in chosen_kinds(trial.kinds):
        type_matrix.passed(as_chosen(kind), "binary", any_database.server.version)


def test_keys_that_must_be_text_are_the_servers_text(any_database: Database) -> None:
    columns = {
        "d": "date",
        "ts": "timestamp",
        "tz": "timestamptz",
        "n": "numeric(12,2)",
        "a": "integer[]",
        "f": "float8[]",
        "b": "bytea[]",
        "m": "money[]",
        "r": "tsrange[]",
        "q": "tsvector[]",
    }
    any_database.sql(
        f"CREATE TABLE t ({', '.join(f'{name} {kind}' for name, kind in columns.items())}, v bool,"
        f" PRIMARY KEY ({', '.join(columns)}))"
    )
    relation, text, binary = both_forms(
        any_database,
        "t",
        r"""INSERT INTO public.t VALUES
            ('infinity', '-infinity', '0044-03-15 BC', 'NaN', '{}', '{NaN,-0,1e300}', '{}', '{}', '{}', '{}', true),
            ('5874897-12-31', '294276-12-31 23:59:59.999999', '2024-02-29 12:00:00.5', -0.01, '{1,NULL,-3}',
             '[0:1]={1e-5,1e15}', '{"\\x00ff",NULL,"\\x"}', '{{1234.5,-0.01},{0,-92233720368547758.08}}',
             '{empty,NULL,"(,\"2024-01-01 00:00:00\"]"}', '{"''a'':1A ''it''''s \"''"}', false),
            ('0001-01-01', '1999-12-31 23:59:59.000001', '1970-01-01', 0, '{{1,2},{3,4}}', '{0.1}', '{"\\x20"}',
             '{1000000}', '{"[infinity,)"}', '{""}', NULL)""",
        "UPDATE public.t SET d = 'infinity' WHERE NOT v",
        "DELETE FROM public.t",
    )
    assert {each.spark for each in column_types(relation)} == {"string", "boolean"}
    assert_same(decoded(relation, text), decoded(relation, binary))


def test_floats_are_written_as_the_server_writes_them(any_database: Database) -> None:
    """Many floats of any size: in arrays of two dimensions, whose text is all that is kept of them."""
    if any_database.server.version < 18 and "MILLSTREAM_TYPE_ROWS" not in os.environ:
        pytest.skip("all of them write floats alike since 12: `make types` runs it")
    chance = random.Random(20)
    some = [struct.unpack("d", chance.randbytes(8))[0] for _ in range(1000)]
    some += [2.0**power for power in range(-1074, 1024, 7)] + [float(f"1e{power}") for power in range(-323, 309, 5)]
    some += [chance.uniform(-1, 1) * 10 ** chance.randint(-8, 40) for _ in range(1000)]
    some += [float(2**52 + 2 * chance.randrange(2**50)) * 2**power for power in range(60)]
    some += [1e23, 9007199254740993.0, 5e-324, 1.7976931348623157e308, 0.0001, 0.00001, 1e14, 1e15, 123456789012345.6]
    small = [struct.unpack("f", chance.randbytes(4))[0] for _ in range(1000)] + [
        2.0**power for power in range(-149, 128)
    ]
    small += [float(chance.randrange(2**26)) * 2**power for power in range(-5, 60)] + [1e5, 1e6, 999999.9, 3.4028235e38]
    any_database.sql("CREATE TABLE t (id int PRIMARY KEY, f float8[], g float4[], p polygon)")
    points = ",".join(f"({x!r},{y!r})" for x, y in zip(some, reversed(some), strict=True) if x == x and y == y)
    relation, text, binary = both_forms(
        any_database,
        "t",
        f"INSERT INTO public.t VALUES (1, '{matrix(some)}', '{matrix(small)}', '({points})')",
    )
    assert_same(decoded(relation, text), decoded(relation, binary))


def matrix(values: Sequence[float]) -> str:
    return "{{" + ",".join("NaN" if value != value else repr(value) for value in values) + "}}"


def test_a_run_of_changes_may_have_both_forms(database: Database) -> None:
    database.sql("CREATE TABLE t (id int PRIMARY KEY, v text, n numeric(10,2), l text[], ts timestamptz)")
    database.sql("ALTER TABLE t REPLICA IDENTITY FULL")
    relation, text, binary = both_forms(
        database,
        "t",
        "INSERT INTO public.t SELECT i, NULLIF('v' || i, 'v7'), CASE WHEN i % 5 = 0 THEN 'NaN' ELSE i / 4.0 END,"
        " CASE WHEN i % 3 = 0 THEN ARRAY[[i::text, NULL], ['a b', '']] ELSE ARRAY[i::text, 'x,y', NULL] END,"
        " CASE WHEN i % 4 = 0 THEN 'infinity' ELSE now() END FROM generate_series(1, 50) i",
        "UPDATE public.t SET v = v || '!'",
        "DELETE FROM public.t WHERE id % 2 = 0",
    )
    mixed = [(text, binary)[number % 2][number] for number in range(len(text))]
    wanted = decoded(relation, text)
    assert sum(len(each) for each in wanted.special.to_pylist()) > 50
    assert_same(wanted, decoded(relation, mixed))
    assert_same(wanted, decoded(relation, mixed[:60] + binary[60:]))


def test_each_built_in_type_is_read_or_has_a_reason() -> None:
    assert {entry.name for entry in TYPES} == BUILT_IN | set(NOT_READ)
    assert not BUILT_IN & set(NOT_READ)


def test_a_refusal_says_why() -> None:
    reasons = {oid: refusal(Column("c", oid), 160000) for oid in (2205, 2210, 1034, 18, 23, 1007, 99999)}
    assert reasons[2205] == (
        "and regclass is the number of an object on the wire and its name in text, "
        "which only the catalog of that moment tells"
    )
    assert reasons[2210] == reasons[2205]
    assert reasons[1034] == "and aclitem has no binary form: the server itself cannot send it so"
    assert [reasons[oid] for oid in (18, 23, 1007)] == [None] * 3
    assert "before Postgres 16" in str(refusal(Column("c", 1002), 150010))
    assert refusal(Column("c", 18, type_kind="b"), 150010) == refusal(Column("c", 1002), 150010)
    assert refusal(Column("c", 99999, type_kind="d", base_type_oid=23), 160000) == reasons[99999]
