"""A line to a server that can be made bad: answers that come late, or never.

It stands between a target and its database, so that what is tried is a real database behind a real socket.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self

BLOCK = 1 << 16


class Proxy:
    """Listens on the loopback interface and passes everything on, both ways; answers wait for `delay` seconds.

    `stall` holds all answers back, without closing anything, until `release`.
    """

    def __init__(self, host: str, port: int) -> None:
        self._server = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._flowing = threading.Event()
        self._flowing.set()
        self._closing = threading.Event()
        self._sockets: list[socket.socket] = []
        self._first = 0
        self.delay = 0.0

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def stall(self, after: int = 0) -> None:
        """From now on no answer comes; on connections that are made from now on, none after the first so many."""
        self._first = after
        self._flowing.clear()

    def release(self) -> None:
        """Let everything through that waits, and what comes."""
        self.delay = 0.0
        self._flowing.set()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._flowing.set()
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
            except OSError:  # closed, or the server is away: then the client finds its connection closed
                continue
            self._sockets += [client, server]
            for source, drain, answers in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._pass_on, args=(source, drain, answers), daemon=True).start()

    def _pass_on(self, source: socket.socket, drain: socket.socket, answers: bool) -> None:
        first, passed = self._first, 0
        with contextlib.suppress(OSError):
            while block := source.recv(BLOCK):
                if answers and passed >= first:
                    self._flowing.wait()
                    self._closing.wait(self.delay)
                passed += 1
                drain.sendall(block)
        with contextlib.suppress(OSError):
            drain.shutdown(socket.SHUT_RDWR)
