"""The envelope: key, old row and new row of a change of any table, as JSON."""

from __future__ import annotations

import json
from typing import Any

from millstream import changelog
from millstream.model import Relation
from millstream.sources.decoders import messages
from millstream.wire.envelope import ENVELOPE, envelope
from tests.fixtures.tuples import NUMERIC_12_2, Change, delete, insert, journal_rows, relation, truncate, update

COLUMNS = (("id", 23), ("price", 1700, NUMERIC_12_2), ("note", 25), ("_ms_op", 25), ("raw", 17))
KEYED = relation(*COLUMNS, key=["id"])
FULL = relation(*COLUMNS, key=["id"], identity="f")
KEYLESS = relation(("a", 23), ("b", 25))

ROW = ["1", "1.50", 'a "b"', "mine", "\\x00ff"]


def images(table: Relation, *changes: Change) -> list[dict[str, Any]]:
    made = envelope(changelog.assemble(journal_rows(changes), table, 1, "0123456789ab"), table)
    assert made.schema.equals(ENVELOPE)
    rows = made.to_pylist()
    return [{n: None if row[n] is None else json.loads(row[n]) for n in ("key", "before", "after")} for row in rows]


NEW = {"id": 1, "price": "1.50", "note": 'a "b"', "_ms_op": "mine", "raw": "AP8="}


def test_an_insert_has_a_new_row_with_the_table_s_own_names() -> None:
    assert images(KEYED, insert(*ROW)) == [{"key": {"id": 1}, "before": None, "after": NEW}]


def test_a_value_that_was_not_sent_is_left_out_and_one_without_home_is_its_text() -> None:
    (change,) = images(KEYED, update(["1", "NaN", ..., None, "\\x"]))
    assert change == {"key": {"id": 1}, "before": None, "after": {"id": 1, "price": "NaN", "_ms_op": None, "raw": ""}}


def test_a_changed_key_and_a_delete_have_the_old_key_alone() -> None:
    old = ["1", None, None, None, None]
    moved, deleted = images(KEYED, update(["2", *ROW[1:]], key=old), delete(key=old))
    assert moved == {"key": {"id": 2}, "before": {"id": 1}, "after": {**NEW, "id": 2}}
    assert deleted == {"key": {"id": 1}, "before": {"id": 1}, "after": None}


def test_an_old_row_is_whole_where_the_source_sends_it_whole() -> None:
    changed, deleted = images(
        FULL, update(["1", "2.00", ..., None, "\\x"], row=ROW), delete(row=["1", "NaN", *ROW[2:]])
    )
    assert changed["before"] == NEW
    assert changed["after"] == {"id": 1, "price": "2.00", "_ms_op": None, "raw": ""}
    assert deleted == {"key": {"id": 1}, "before": {**NEW, "price": "NaN"}, "after": None}


def test_a_key_that_was_not_sent_again_is_taken_from_the_old_one() -> None:
    text_key = relation(("id", 25), ("n", 23), key=["id"])
    (change,) = images(text_key, update([..., "5"], key=["long", None]))
    assert change == {"key": {"id": "long"}, "before": {"id": "long"}, "after": {"n": 5}}


def test_a_truncate_and_a_table_without_key_have_no_key() -> None:
    empty: dict[str, Any] = {"key": None, "before": None, "after": None}
    assert images(KEYED, truncate(), insert(*ROW))[0] == empty
    assert images(KEYLESS, insert("1", None)) == [{**empty, "after": {"a": 1, "b": None}}]


def test_a_logical_message_is_a_change_too() -> None:
    payload = b"M\x01" + bytes(8) + b"topic\0" + (2).to_bytes(4, "big") + b"hi"
    (change,) = images(messages("postgres"), ("m", payload))
    after = {"prefix": "topic", "content": "aGk=", "transactional": True}
    assert change == {"key": None, "before": None, "after": after}


def test_no_rows_are_no_rows() -> None:
    assert images(KEYED) == []
