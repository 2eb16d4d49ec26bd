"""Every type, on every server: what was captured and decoded is what a SELECT says."""

from __future__ import annotations

import os

import pytest

from millstream.sources.postgres.catalog import relations
from millstream.sources.postgres.types import EXTENSIONS as KNOWN_EXTENSIONS
from millstream.sources.postgres.types import TYPES, column_types
from tests.fixtures.postgres import Database
from tests.fixtures.type_matrix import TypeMatrix
from tests.fixtures.type_oracle import (
    Trial,
    as_chosen,
    available,
    bare,
    changes,
    chosen,
    chosen_kinds,
    decoded,
    session,
)
from tests.fixtures.typed_values import EXTENSIONS, KINDS, Kind

pytestmark = pytest.mark.postgres

ROWS = int(os.environ.get("MILLSTREAM_TYPE_ROWS", "40"))

NO_INPUT = ("pg_node_tree", "pg_ndistinct", "pg_dependencies", "pg_mcv_list")
"""Types whose values only the server can make: they have a test of their own."""

SENT_IN_BINARY = ("pg_node_tree", "pg_mcv_list")
"""Those of them whose binary form tells their text."""

NO_VALUES = ("gtsvector", "pg_brin_bloom_summary", "pg_brin_minmax_multi_summary")
"""Types that live in indexes alone: no column of a table can hold a value of them."""


def all_kinds(database: Database) -> list[Kind]:
    kinds = available(database, KINDS)
    return [*kinds, *(kind.array() for kind in kinds if kind.list_of is None)]


def test_every_value_of_every_type_is_what_a_select_says(any_database: Database, type_matrix: TypeMatrix) -> None:
    if any_database.server.version == 16 and "MILLSTREAM_TYPE_ROWS" not in os.environ:
        pytest.skip("between the oldest and the newest: `make types` runs it")
    trial = Trial(any_database, all_kinds(any_database), ROWS)
    results = trial.decoded(trial.relations)
    wrong = {kind.name: trial.wrong(kind, results) for kind in trial.kinds}
    for kind in trial.kinds:
        if wrong[kind.name] is None:
            type_matrix.passed(kind.name, "text", any_database.server.version)
    assert {name: what for name, what in wrong.items() if what is not None} == {}
    assert trial.wrong_copies(trial.relations["keyed"], trial.kinds) == {}, "a baseline reads something else"
    without_the_catalog(trial)
    with_every_choice(trial)
    for kind in chosen_kinds(trial.kinds):
        type_matrix.passed(as_chosen(kind), "text", any_database.server.version)


def with_every_choice(trial: Trial) -> None:
    """The types that a source can be asked for hold the same values."""
    relations = {name: chosen(relation) for name, relation in trial.relations.items()}
    results = trial.decoded(relations)
    kinds = chosen_kinds(trial.kinds)
    assert [kind.name for kind in kinds] == ["time", "timetz", "interval", "time[]", "timetz[]", "interval[]"]
    assert {kind.name: wrong for kind in kinds if (wrong := trial.wrong(kind, results)) is not None} == {}
    odd = {name for entries in results["keyed"].result.special.to_pylist() for name, _ in entries}
    assert {"time", "time[]", "interval[]"} <= odd, "no value without a home was tried"


def without_the_catalog(trial: Trial) -> None:
    """What the log alone describes decodes too: to the same, or to the exact text."""
    plain = {name: bare(relation) for name, relation in trial.relations.items()}
    results = trial.decoded(plain)
    types = zip(column_types(trial.relations["keyed"]), column_types(plain["keyed"]), strict=True)
    for kind, (known, unknown) in zip(trial.kinds, list(types)[1:], strict=True):
        if known == unknown:
            assert trial.wrong(kind, results) is None
        else:
            assert unknown.spark == "string"
            texts = results["keyed"].result.after[kind.name].to_pylist()
            assert texts[: trial.rows] == [each.text for each in trial.said[kind.name]]


def test_each_type_of_the_table_is_tried() -> None:
    tried = {kind.name for kind in KINDS}
    assert {entry.name for entry in TYPES} - tried == {*NO_INPUT, *NO_VALUES}
    assert {entry.name for entry in KNOWN_EXTENSIONS} == {kind.name for kind in EXTENSIONS}


def test_types_that_only_the_server_writes_arrive_as_text(any_database: Database, type_matrix: TypeMatrix) -> None:
    slot = f"trial_{any_database.name}"
    any_database.sql("""
        CREATE TABLE facts (a int, b int);
        INSERT INTO facts SELECT i % 10, i % 20 FROM generate_series(1, 1000) i;
        CREATE STATISTICS both_of ON a, b FROM facts;
        ANALYZE facts;
        CREATE TABLE made (key bigint PRIMARY KEY, pg_node_tree pg_node_tree, pg_ndistinct pg_ndistinct,
            pg_dependencies pg_dependencies, pg_mcv_list pg_mcv_list);
        CREATE TABLE sent (key bigint PRIMARY KEY, pg_node_tree pg_node_tree, pg_mcv_list pg_mcv_list);
        CREATE PUBLICATION trial FOR TABLE made;
        CREATE PUBLICATION trial_of_sent FOR TABLE sent""")
    any_database.sql(
        f"SELECT pg_create_logical_replication_slot('{slot}' || n, 'pgoutput') FROM unnest('{{1,2}}'::text[]) n"
    )
    any_database.sql("""
        INSERT INTO made SELECT 1, (SELECT ev_action FROM pg_rewrite ORDER BY length(ev_action::text) LIMIT 1),
            stxdndistinct, stxddependencies, stxdmcv FROM pg_statistic_ext_data;
        INSERT INTO sent SELECT key, pg_node_tree, pg_mcv_list FROM made""")
    with session(any_database) as connection:
        messages = [raw for raw in changes(connection, f"{slot}1") if raw[:1] == b"I"]
        options = {"publication_names": "trial_of_sent", "binary": "true"}
        in_binary = [raw for raw in changes(connection, f"{slot}2", **options) if raw[:1] == b"I"]
        texts = ", ".join(f"{name}::text" for name in NO_INPUT)
        (said,) = connection.execute(f"SELECT {texts} FROM public.made".encode())
        made, sent = relations(connection, ["public.made", "public.sent"])
    result = decoded(made, messages)
    assert [result.after[name].to_pylist() for name in NO_INPUT] == [[text] for text in said]
    assert all(said)
    for name in NO_INPUT:
        type_matrix.passed(name, "text", any_database.server.version)
    again = decoded(sent, in_binary)
    for name in SENT_IN_BINARY:
        assert again.after[name].equals(result.after[name])
        type_matrix.passed(name, "binary", any_database.server.version)
