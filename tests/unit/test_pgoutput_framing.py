"""Messages of the replication protocol are cut and read exactly."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from millstream.sources.postgres.pgoutput import (
    KEEPALIVE,
    UNIX_OF_2000_US,
    Keepalive,
    ProtocolError,
    frame,
    frame_rows,
    parse_keepalive,
    parse_relation,
    parse_truncate,
    status_update,
)
from tests.fixtures import pgoutput as pg


def frames(*messages: bytes):
    return frame(messages, [len(message) for message in messages])


def test_messages_are_cut_at_their_tags_and_ends() -> None:
    sent = [pg.begin(5), pg.change("I", 16384, b"Nabc"), pg.keepalive(9), pg.commit(5, 8)]
    cut = frames(*sent)
    assert cut.tag.tolist() == [ord("B"), ord("I"), KEEPALIVE, ord("C")]
    assert [cut.payload(n) for n in range(4)] == [sent[0][25:], sent[1][25:], sent[2], sent[3][25:]]


def test_fields_are_read_at_any_offset_in_network_order() -> None:
    cut = frames(pg.change("I", 0xFFFF_FFFE, b"x" * 3), pg.begin(0x0123_4567_89AB_CDEF, -1, 7))
    assert cut.uint32(cut.at[:1] + 1).tolist() == [0xFFFF_FFFE]
    assert cut.int64(cut.at[1:] + 1).tolist() == [0x0123_4567_89AB_CDEF]
    assert cut.int64(cut.at[1:] + 9).tolist() == [-1]


def test_an_unknown_replication_message_is_refused() -> None:
    with pytest.raises(ProtocolError, match="unknown kind"):
        frames(pg.begin(1), b"zzzz")


def test_a_message_without_content_is_refused() -> None:
    with pytest.raises(ProtocolError, match="too short"):
        frames(pg.data(b""))


def test_a_relation_is_read_with_its_key_and_types() -> None:
    body = b"R" + struct.pack(">I", 4711) + "schön".encode() + b"\0t\0f" + struct.pack(">h", 2)
    body += b"\1id\0" + struct.pack(">Ii", 20, -1) + b"\0price\0" + struct.pack(">Ii", 1700, 655366)
    relation = parse_relation(body)
    assert (relation.oid, relation.schema, relation.name, relation.identity) == (4711, "schön", "t", "f")
    assert [(c.name, c.type_oid, c.type_mod, c.key) for c in relation.columns] == [
        ("id", 20, -1, True),
        ("price", 1700, 655366, False),
    ]
    assert not relation.enriched


def test_an_empty_schema_name_stands_for_the_catalog() -> None:
    assert parse_relation(pg.relation(5, schema="")[25:]).schema == "pg_catalog"


@pytest.mark.parametrize("cut", [3, 6, 9, 12, 15, 20])
def test_a_relation_that_is_cut_short_is_refused(cut: int) -> None:
    with pytest.raises(ProtocolError):
        parse_relation(pg.relation(5)[25 : 25 + cut])


def test_a_truncate_names_every_relation() -> None:
    assert parse_truncate(pg.truncate(3, 1, 0xFFFF_FFFF)[25:]) == (3, 1, 0xFFFF_FFFF)
    with pytest.raises(ProtocolError):
        parse_truncate(pg.truncate(3, 1)[25:-1])


def test_a_keepalive_says_whether_it_wants_an_answer() -> None:
    assert parse_keepalive(pg.keepalive(77, reply=True)) == Keepalive(77, reply=True)
    assert parse_keepalive(pg.keepalive(78)) == Keepalive(78, reply=False)
    with pytest.raises(ProtocolError):
        parse_keepalive(b"k123")


def test_a_status_update_tells_received_and_acknowledged_apart() -> None:
    sent = status_update(written=20, flushed=10, unix_us=UNIX_OF_2000_US + 5)
    assert struct.unpack(">cqqqqB", sent) == (b"r", 20, 10, 10, 5, 0)


HEADER = b"PGCOPY\n\xff\r\n\0" + struct.pack(">II", 0, 0)
END = b"\xff\xff"


def row(message: bytes) -> bytes:
    return struct.pack(">hi", 1, len(message)) + message


def frame_copy(*messages: bytes, first: bool = True):
    return frame_rows(b"".join(messages), np.array([len(m) for m in messages], np.int64), first=first, clock=7)


def test_rows_of_a_copy_are_cut_as_messages_of_a_stream_are() -> None:
    sent = [message[25:] for message in (pg.begin(5), pg.change("I", 16384, b"Nabc"), pg.commit(5, 8))]
    whole = frame_copy(HEADER + row(sent[0]), row(sent[1]), row(sent[2]), END)
    assert [whole.payload(n) for n in range(3)] == sent
    assert whole.tag.tolist() == list(b"BIC")
    assert whole.sent_at(np.array([0, 2])).tolist() == [7, 7]
    later = frame_copy(row(sent[1]), row(sent[2]), END, first=False)
    assert [later.payload(n) for n in range(len(later))] == sent[1:]


def test_a_copy_without_rows_and_a_piece_without_messages_are_empty() -> None:
    assert len(frame_copy(HEADER + END)) == 0
    assert len(frame_copy(HEADER, END)) == 0
    assert len(frame_copy(first=False)) == 0


def test_the_header_of_a_copy_can_be_longer() -> None:
    longer = HEADER[:-4] + struct.pack(">I", 3) + b"abc"
    assert frame_copy(longer + row(b"Bx"), END).payload(0) == b"Bx"


@pytest.mark.parametrize(
    "messages",
    [
        (row(b"B"),),
        (HEADER + row(b"B"), b"\0\0"),
        (HEADER + row(b"B"), struct.pack(">hi", 2, 1) + b"B"),
        (HEADER + row(b"B"), struct.pack(">hi", 1, 9) + b"B"),
        (HEADER + struct.pack(">hi", 1, -1) + b"B",),
    ],
)
def test_bytes_that_are_no_copy_of_one_column_are_refused(messages: tuple[bytes, ...]) -> None:
    with pytest.raises(ProtocolError, match="the server sent"):
        frame_copy(*messages)
