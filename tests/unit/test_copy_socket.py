"""A copy read from the socket: its rows, whatever they look like and in whatever pieces they arrive."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.pq.abc import PGconn

from millstream.errors import SourceUnavailable
from millstream.sources.postgres import copy_socket
from millstream.sources.postgres.copy_socket import HEAD, CopySocket, is_open_to_read
from millstream.sources.postgres.pgoutput import ProtocolError
from millstream.sources.postgres.session import Refused, Session

COLUMNS = 2
HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
ROW = struct.pack(">h", COLUMNS)
LOOKS_LIKE_A_ROW = b"d" + struct.pack(">i", 20) + ROW


def message(tag: bytes, content: bytes = b"") -> bytes:
    return tag + struct.pack(">i", len(content) + 4) + content


BEGIN = message(b"N", b"SNOTICE\0\0") + message(b"H", struct.pack(">bhhh", 1, COLUMNS, 1, 1))
END = message(b"c") + message(b"C", b"COPY 1\0") + message(b"Z", b"T")


def copy_of(rows: Sequence[bytes]) -> bytes:
    """What a server sends: its header stands before the first row, and a row that is none ends it."""
    first, *rest = [*rows, b"\xff\xff"]
    return BEGIN + message(b"d", HEADER + first) + b"".join(message(b"d", row) for row in rest) + END


class Connection:
    """What a session has of libpq: the socket, and the ways to end it."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end.fileno()
        self.calls: list[str] = []

    def get_cancel(self) -> Connection:
        return self

    def cancel(self) -> None:
        self.calls.append("cancel")

    def finish(self) -> None:
        self.calls.append("finish")


@contextmanager
def server(sent: bytes, piece: int) -> Iterator[Connection]:
    """Takes a statement, sends this in such pieces, and closes."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)

    def serve() -> None:
        # Who has read enough closes its end.
        with theirs, contextlib.suppress(OSError):
            theirs.recv(1 << 16)
            for at in range(0, len(sent), piece):
                theirs.sendall(sent[at : at + piece])

    thread = threading.Thread(target=serve)
    thread.start()
    with ours:
        yield Connection(ours)
    thread.join()


def read(connection: Connection) -> list[bytes]:
    """The rows, without the heads of their messages."""
    with CopySocket(session_of(connection), "the session") as copy:
        found = [row for rows in sent(copy) for row in rows.to_pylist()]
    assert all(row == message(b"d", row[HEAD:]) for row in found)
    return [row[HEAD:] for row in found]


def sent(copy: CopySocket) -> Iterator[pa.LargeBinaryArray]:
    copy.send("COPY it")
    return copy.rows()


def session_of(connection: Connection) -> Session:
    return Session(cast(PGconn, connection))


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_socket, "RUN_BYTES", 300)
    monkeypatch.setattr(copy_socket, "_ROOM", 100)


cells = st.one_of(st.binary(max_size=60), st.sampled_from([b"", LOOKS_LIKE_A_ROW, LOOKS_LIKE_A_ROW[:6], b"d\0\0"]))
some_rows = st.lists(st.lists(cells, max_size=4).map(lambda parts: ROW + b"".join(parts)), max_size=30)


@given(rows=some_rows, piece=st.sampled_from([1, 7, 64, 1000]))
def test_all_rows_come_whatever_they_look_like(rows: list[bytes], piece: int) -> None:
    with server(copy_of(rows), piece) as connection:
        assert read(connection) == rows
        assert not connection.calls, "the session goes on"


def test_rows_that_are_larger_than_anything_there_was_come_whole() -> None:
    rows = [ROW + b"a", ROW + b"b" * 100_000, ROW + LOOKS_LIKE_A_ROW * 10_000, ROW, ROW + b"c" * 65_530]
    with server(copy_of(rows), 1 << 16) as connection:
        assert read(connection) == rows


REFUSED = message(b"E", b"SERROR\0C22012\0Mdivision by zero\0\0")


def test_a_refusal_after_some_rows_is_told_and_the_session_goes_on() -> None:
    sent = copy_of([ROW + b"a"])[: -len(END)] + REFUSED + message(b"Z", b"E")
    with server(sent, 1000) as connection:
        with pytest.raises(Refused, match="division by zero") as refused:
            read(connection)
        assert refused.value.sqlstate == "22012"
        assert not connection.calls


LOST: dict[str, tuple[bytes, type[Exception], str]] = {
    "in a row": (copy_of([ROW + b"a" * 50])[:90], SourceUnavailable, "was lost"),
    "at once": (b"", SourceUnavailable, "was lost"),
    "with a reason": (
        BEGIN + message(b"E", b"SFATAL\0C57P01\0Mterminating connection\0\0"),
        SourceUnavailable,
        "terminating",
    ),
    "by something else": (message(b"T", b"\0\0"), ProtocolError, "no part of a copy"),
}


@pytest.mark.parametrize("case", LOST)
def test_a_copy_that_does_not_come_to_its_end_is_an_error_and_ends_the_session(case: str) -> None:
    sent, error, why = LOST[case]
    with server(sent, 1000) as connection:
        with pytest.raises(error, match=why):
            read(connection)
        assert connection.calls == ["cancel", "finish"]


def test_who_leaves_early_ends_what_the_server_does() -> None:
    with server(copy_of([ROW + b"a" * 200] * 100), 1000) as connection:
        with CopySocket(session_of(connection), "the session") as copy:
            next(sent(copy))
        assert connection.calls == ["cancel", "finish"]


@pytest.mark.parametrize(
    ("known", "is_open"),
    [
        ({"ssl_in_use": False, "used_gssapi": False}, True),
        ({"ssl_in_use": True, "used_gssapi": False}, False),
        ({"ssl_in_use": False, "used_gssapi": True}, False),
        ({"ssl_in_use": False}, False),
    ],
    ids=["plain", "TLS", "GSSAPI", "not known"],
)
def test_only_what_nobody_encrypts_is_read_from_the_socket(known: dict[str, bool], is_open: bool) -> None:
    assert is_open_to_read(cast(PGconn, SimpleNamespace(**known))) is is_open


def test_who_has_other_things_to_do_gets_a_turn_while_nothing_comes() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs, CopySocket(session_of(Connection(ours)), "the session") as copy:
        copy.send("COPY it")
        rows = copy.rows(0.01)
        assert [len(next(rows)), len(next(rows))] == [0, 0], "nothing was sent yet"
        theirs.sendall(copy_of([ROW + b"a", ROW + b"b"])[:-4])
        assert [row[HEAD:] for row in first_of(rows)] == [ROW + b"a", ROW + b"b"]
        assert not copy.over
        theirs.sendall(END[-4:])
        assert all(len(each) == 0 for each in rows)
        assert copy.over


def first_of(rows: Iterator[pa.LargeBinaryArray]) -> list[bytes]:
    return next(each.to_pylist() for each in rows if len(each))
