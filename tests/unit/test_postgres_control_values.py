"""The plain rules of the Postgres control side: positions, options, patterns, identities, names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import ConfigError, SourceHalted
from millstream.model import SourceSpec
from millstream.sources.postgres.checks import parse_history
from millstream.sources.postgres.connection import translate
from millstream.sources.postgres.identity import IdentityFacts, filter_dangers, partition_mismatch, usable_identity
from millstream.sources.postgres.lsn import format_lsn, parse_lsn
from millstream.sources.postgres.options import PostgresOptions, default_name
from millstream.sources.postgres.patterns import parse_patterns, quote
from millstream.sources.postgres.server import is_synchronous
from millstream.sources.postgres.slot import SlotInfo, slot_problem


def options_of(name: str = "shop", **options: Any) -> PostgresOptions:
    return PostgresOptions.of(SourceSpec(name, "postgres", "postgresql://h/d", None, ("public.*",), options=options))


# Positions


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_texts_of_positions_sort_as_the_positions_do(a: int, b: int) -> None:
    assert parse_lsn(format_lsn(a)) == a
    assert (format_lsn(a) < format_lsn(b)) == (a < b)


def test_the_servers_own_text_is_read() -> None:
    assert parse_lsn("16/B374D848") == 0x16B374D848
    assert format_lsn(0x16B374D848) == "00000016/B374D848"
    assert parse_lsn("0/0") == 0


@pytest.mark.parametrize("text", ["", "0", "0/", "/0", "0/123456789", "g/0", "0/0 ", "-1/0"])
def test_what_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a log position"):
        parse_lsn(text)


def test_the_history_of_a_timeline_says_where_it_was_left() -> None:
    history = "1\t0/3000148\tno recovery target specified\n\n2\t0/5000000\tbefore 2026-01-01 # switched\n"
    assert parse_history(history) == [[1, 0x3000148], [2, 0x5000000]]
    assert parse_history("") == []


# Options


def test_names_come_from_the_source_unless_given() -> None:
    options = options_of()
    assert (options.slot, options.publications) == ("millstream_shop", ("millstream_shop", "millstream_shop_insert"))
    given = options_of(slot="my_slot", publication="Pub")
    assert (given.slot, given.publications) == ("my_slot", ("Pub", "Pub_insert"))
    assert options_of(slot="my_slot").publication == "my_slot"


def test_two_sources_never_share_a_default_slot() -> None:
    names = ["shop", "Shop", "sh-op", "sh_op", "sh op", "s" * 60, "s" * 61, "läden"]
    slots = [default_name(name) for name in names]
    assert len(set(slots)) == len(names)
    for slot in slots:
        assert options_of(slot=slot).slot == slot


def test_every_problem_of_the_options_is_told_at_once_with_the_nearest_key() -> None:
    with pytest.raises(ConfigError) as caught:
        options_of(slott="x", heartbeat_interval="soon {x}", origin="some", slot="Bad-Slot", unheard="of")
    said = caught.value.message
    assert "slott: unknown key, did you mean slot?" in said
    assert "heartbeat_interval: 'soon {x}' is not a duration" in said
    assert "origin: must be 'any' or 'none'" in said
    assert "slot: must be a name of at most 56 letters" in said
    assert "unheard: unknown key; known keys: slot, publication, heartbeat_interval" in said


def test_leaving_data_out_on_the_server_must_be_asked_for() -> None:
    for pushed in ({"columns": {"public.a": ["id"]}}, {"rows": {"public.a": "id > 1"}}):
        with pytest.raises(ConfigError, match="add push: true"):
            options_of(**pushed)
        assert options_of(push=True, **pushed).push
    with pytest.raises(ConfigError, match=r"columns\.public\.a"):
        options_of(push=True, columns={"public.a": []})


def test_durations_are_read_as_people_write_them() -> None:
    options = options_of(heartbeat_interval="0", status_interval="500ms", connect_timeout="1m")
    assert (options.heartbeat_interval, options.status_interval, options.connect_timeout) == (0, 500, 60_000)


def test_the_plugin_is_told_what_its_version_knows() -> None:
    options = options_of(messages=False, origin="none")
    assert options.plugin_options(150014) == {
        "proto_version": "1",
        "publication_names": '"millstream_shop","millstream_shop_insert"',
        "messages": "false",
    }
    assert options.plugin_options(160010)["origin"] == "none"


@pytest.mark.parametrize(
    ("protocol", "more"),
    [
        (1, {"proto_version": "1"}),
        (2, {"proto_version": "2", "streaming": "on"}),
        (3, {"proto_version": "3", "streaming": "on"}),
        (4, {"proto_version": "4", "streaming": "parallel"}),
    ],
)
def test_a_stream_asks_for_the_protocol_and_bulk_reading_for_the_first(protocol: int, more: dict[str, str]) -> None:
    options = options_of(protocol=protocol)
    assert options.stream_options(160010) == {**options.plugin_options(160010), **more}
    assert options.plugin_options(160010)["proto_version"] == "1"


# Patterns


@pytest.mark.parametrize(
    ("pattern", "matching", "other", "literal"),
    [
        ("public.orders", [("public", "orders")], [("public", "Orders"), ("public", "orders2")], True),
        (
            "public.item_*",
            [("public", "item_"), ("public", "item_a.b")],
            [("public", "itemXa"), ("p", "item_a")],
            False,
        ),
        ("*.*", [("a", "b"), ("x.y", "z%")], [], False),
        ("public.t?", [("public", "t1")], [("public", "t"), ("public", "t12")], False),
        ('"My Schema"."T.*"', [("My Schema", "T.*")], [("My Schema", "T.a"), ("my schema", "T.*")], True),
        ('public."a""b"', [("public", 'a"b')], [("public", "a")], True),
        ("public.50%_off\\", [("public", "50%_off\\")], [("public", "50xx_off\\"), ("public", "50%xoff\\")], True),
        ("public.Großes Buch", [("public", "Großes Buch")], [], True),
    ],
)
def test_a_pattern_means_these_tables(
    pattern: str, matching: list[tuple[str, str]], other: list[tuple[str, str]], literal: bool
) -> None:
    (parsed,) = parse_patterns([pattern])
    assert parsed.literal is literal
    assert [pair for pair in matching + other if parsed.matches(*pair)] == matching


def test_all_wrong_patterns_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"'orders', 'a\.b\.c', '\"open\.x'"):
        parse_patterns(["orders", "public.ok", "a.b.c", '"open.x'])
    with pytest.raises(ConfigError, match="no tables are named"):
        parse_patterns([])


def test_identifiers_are_always_quoted() -> None:
    assert quote("public", 'odd"name') == '"public"."odd""name"'


# Identities

LOST_INDEX = "the index of its replica identity was dropped or is invalid"


def index(*columns: str, primary: bool = False, identity: bool = False, **other: bool) -> dict[str, Any]:
    return {"usable": True, "immediate": True, "primary": primary, "identity": identity, "columns": columns, **other}


@pytest.mark.parametrize(
    ("identity", "indexes", "key", "unusable"),
    [
        ("d", [index("a", "b", primary=True)], ("a", "b"), None),
        ("d", [], (), "it has no primary key"),
        ("d", [index("a", primary=True, immediate=False)], (), "its primary key is deferrable"),
        ("i", [index("a", primary=True), index("b", identity=True)], ("b",), None),
        ("i", [index("a", primary=True)], (), LOST_INDEX),
        ("i", [index("b", identity=True, usable=False)], (), LOST_INDEX),
        ("f", [index("a", primary=True)], ("a",), None),
        ("f", [], ("a", "b", "c"), None),
        ("f", [index("a", primary=True, immediate=False)], ("a", "b", "c"), None),
        ("n", [index("a", primary=True)], (), "its replica identity is NOTHING"),
    ],
)  # fmt: skip
def test_the_key_follows_the_replica_identity(
    identity: str, indexes: list[dict[str, Any]], key: tuple[str, ...], unusable: str | None
) -> None:
    facts = IdentityFacts.of(identity, indexes)
    columns = ("a", "b", "c")
    assert facts.key(columns) == key
    reason, fix = usable_identity(facts, '"t"', published=frozenset(columns), virtual=False)
    assert reason == unusable
    assert (fix is None) == (reason is None)


def test_the_fix_of_an_identity_is_sql_that_can_work() -> None:
    def fix(identity: str, *indexes: dict[str, Any], virtual: bool = False) -> str | None:
        facts = IdentityFacts.of(identity, indexes)
        return usable_identity(facts, '"t"', published=frozenset("ab"), virtual=virtual)[1]

    full = 'ALTER TABLE "t" REPLICA IDENTITY FULL'
    assert fix("d") == f'ALTER TABLE "t" ADD PRIMARY KEY (...), or {full}'
    assert fix("d", index("a", primary=True, immediate=False)) == full
    assert fix("n", index("a", primary=True)) == 'ALTER TABLE "t" REPLICA IDENTITY DEFAULT'
    assert fix("f", index("a", primary=True), virtual=True) == 'ALTER TABLE "t" REPLICA IDENTITY DEFAULT'
    assert fix("f", virtual=True) == 'ALTER TABLE "t" ADD PRIMARY KEY (...)'
    assert fix("d", index("hidden", primary=True)) == full


def test_partitions_must_have_the_identity_of_the_table() -> None:
    keyed = IdentityFacts.of("d", [index("a", primary=True)])
    full = IdentityFacts.of("f", [index("a", primary=True)])
    bare = IdentityFacts.of("n", [index("a", primary=True)])
    assert partition_mismatch(keyed, [("p1", keyed)]) == (None, None)
    assert partition_mismatch(full, [("p1", full)]) == (None, None)
    assert partition_mismatch(keyed, [("p1", keyed), ("p2", full)])[1] == "ALTER TABLE p2 REPLICA IDENTITY DEFAULT"
    assert partition_mismatch(full, [("p1", keyed)])[1] == "ALTER TABLE p1 REPLICA IDENTITY FULL"
    assert partition_mismatch(keyed, [("p1", bare)])[1] == "ALTER TABLE p1 REPLICA IDENTITY DEFAULT"


def test_lists_and_filters_must_leave_the_identity_whole() -> None:
    assert filter_dangers("d", ["a"], ["a", "b"], ["a"]) == []
    assert filter_dangers("d", ["a"], None, []) == []
    assert filter_dangers("f", ["a", "b"], None, ["b"]) == []
    assert filter_dangers("d", ["a"], ["b"], []) == ["the column list lacks a of the replica identity"]
    assert filter_dangers("f", ["a", "b"], ["a", "b"], []) == [
        "a column list is not possible with REPLICA IDENTITY FULL"
    ]
    assert filter_dangers("d", ["a"], None, ["a", "b"]) == ["the row filter uses b, not of the replica identity"]


# Synchronous standbys


@pytest.mark.parametrize(
    ("names", "matches"),
    [
        ("", False),
        ("*", True),
        ("one, two", False),
        ("FIRST 2 (one, *)", True),
        ("ANY 1 (one, two)", False),
        ('ANY 1 (one, "Millstream millstream_shop")', True),
        ('"millstream millstream_shop"', True),
        ('"millstream"', False),
        ("2 (a, b)", False),
    ],
)
def test_commits_wait_for_us_only_if_the_setting_means_us(names: str, matches: bool) -> None:
    assert is_synchronous(names, "millstream millstream_shop") is matches


# Slots


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"wal_status": "unreserved"}, None),
        ({"wal_status": "lost"}, "slot s has lost log that we need (max_slot_wal_keep_size)"),
        ({"wal_status": "lost", "invalidation": "wal_removed"}, "slot s has lost log that we need (wal_removed)"),
        ({"invalidation": "idle_timeout"}, "slot s was invalidated (idle_timeout)"),
        ({"plugin": "wal2json"}, "slot s belongs to the plugin wal2json, not to pgoutput"),
        ({"database": "other"}, "slot s belongs to the database other, not to shop"),
        ({"temporary": True}, "slot s is temporary"),
        (
            {"two_phase": True},
            "slot s was made with two_phase: it sends transactions when they are prepared, and Millstream takes them "
            "when they commit",
        ),
        ({"confirmed_flush": None}, "slot s was never finished"),
    ],
)
def test_a_slot_that_cannot_go_on_says_why(change: dict[str, Any], problem: str | None) -> None:
    sound = SlotInfo("s", "pgoutput", "shop", False, False, None, "reserved", None, None, 1, 2, 3, 4, 0, 0)
    assert slot_problem(replace(sound, **change), "shop") == problem


# Errors of the server


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("XX000", "invalid memory alloc request size 1258291203"),
        ("54000", "string buffer exceeds maximum allowed length (1073741823 bytes)"),
        ("54000", "out of memory"),
    ],
)
def test_a_row_too_large_to_be_sent_is_named(state: str, message: str) -> None:
    error = translate(state, message, "reading the log")
    assert isinstance(error, SourceHalted)
    assert "larger than 1 GB" in error.message
    assert "journal rebase" in (error.hint or "")
