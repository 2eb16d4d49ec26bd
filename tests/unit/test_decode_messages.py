"""Logical messages become rows of a table of their own."""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
import pytest

from millstream.errors import JournalCorrupt
from millstream.model import Op, Relation
from millstream.sources.base import Decoded
from millstream.sources.decoders import decoder, messages

MESSAGES = messages("postgres")


def message(prefix: bytes, content: bytes, *, transactional: bool) -> bytes:
    return (
        b"M" + struct.pack(">bq", transactional, 0x16B3748) + prefix + b"\0" + struct.pack(">I", len(content)) + content
    )


def decoded(raw: list[bytes]) -> Decoded:
    return decoder(MESSAGES).decode(np.full(len(raw), Op.MESSAGE, np.uint8), pa.array(raw, pa.large_binary()))


def test_messages_have_prefix_content_and_whether_they_are_transactional() -> None:
    raw = [
        message(b"audit", b'{"who": 1}', transactional=True),
        message(b"", b"\0\xff\0", transactional=False),
        message("é".encode(), b"", transactional=False),
    ]
    result = decoder(MESSAGES).decode(
        np.full(3, Op.MESSAGE, np.uint8), pa.array([b"x", *raw, b"y"], pa.large_binary()).slice(1, 3)
    )
    result.after.validate(full=True)
    assert result.after.to_pylist() == [
        {"prefix": "audit", "content": b'{"who": 1}', "transactional": True},
        {"prefix": "", "content": b"\0\xff\0", "transactional": False},
        {"prefix": "é", "content": b"", "transactional": False},
    ]
    assert not result.has_before.any()
    assert result.special.to_pylist() == [[], [], []]


def test_a_prefix_that_is_no_utf8_is_kept_as_hex() -> None:
    result = decoded([message(b"ok", b"1", transactional=True), message(b"\xff", b"2", transactional=True)])
    assert result.after["prefix"].to_pylist() == ["ok", None]
    assert result.special.to_pylist() == [[], [("prefix", "\\xff")]]


def test_no_messages_have_a_schema() -> None:
    assert decoded([]).after.schema.names == ["prefix", "content", "transactional"]


GOOD = message(b"p", b"abc", transactional=True)


@pytest.mark.parametrize("raw", [b"", b"M", GOOD[:8], GOOD[:-1], GOOD + b"x", b"I" + GOOD[1:], GOOD[:11]])
def test_bytes_that_are_no_message_are_refused(raw: bytes) -> None:
    for several in ([raw], [GOOD, raw], [raw, GOOD]):
        with pytest.raises(JournalCorrupt):
            decoded(several)


def test_a_change_of_a_table_is_no_message() -> None:
    with pytest.raises(JournalCorrupt, match="among the logical messages"):
        decoder(MESSAGES).decode(np.array([Op.CREATE], np.uint8), pa.array([GOOD], pa.large_binary()))


def test_a_kind_of_source_that_nobody_knows_is_named() -> None:
    with pytest.raises(JournalCorrupt, match="'oracle'"):
        decoder(Relation(1, "s", "t", "d", (), source_kind="oracle"))
    with pytest.raises(JournalCorrupt, match="'oracle'"):
        messages("oracle")
