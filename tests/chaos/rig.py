"""A stream under load that can be crashed anywhere, and the proof that nothing was lost or doubled."""

from __future__ import annotations

import ast
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Self

import millstream
from millstream.demo.engine import Engine, descendants
from millstream.demo.proof import LogProof, prove_locally
from millstream.demo.shop import Shop
from millstream.demo.watch import Sight, Watch
from millstream.engine.home import Home
from millstream.journal import verify
from tests.fixtures.postgres import Database

STREAM_FILE = """\
name: shop
source:
  kind: postgres
  uri: {uri}
  tables: ["public.*"]
  heartbeat_interval: 1s
mode: cdc
targets:
  - {{name: log, kind: files, path: log, format: parquet, batch: {{max_ms: {max_ms}}}}}
"""


def failpoints() -> list[str]:
    """Every failpoint that the code names, in the order of files and lines."""
    return list(_failpoints())


@cache
def _failpoints() -> tuple[str, ...]:
    found: list[str] = []
    for path in sorted(Path(millstream.__file__).parent.rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "failpoint(" in text else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "failpoint":
                (name,) = node.args
                assert isinstance(name, ast.Constant), f"{path}:{node.lineno}: a failpoint's name must be a literal"
                found.append(name.value)
    return tuple(found)


class Rig:
    """The shop's database, its load, and `millstream run` in a process that gets killed."""

    def __init__(self, directory: Path, database: Database, seed: int, max_ms: str = "100ms") -> None:
        self.directory = directory
        self.database = database
        self.shop = Shop(database.uri, seed)
        stream_file = directory / "shop.yaml"
        stream_file.write_text(STREAM_FILE.format(uri=database.uri, max_ms=max_ms))
        self.home = Home(directory / "home")
        self.path = directory / "log"
        self.engine = Engine(stream_file, self.home.path, directory / "engine.log")
        self.watch = Watch(self.home, "shop", self.path)
        self._expected_outage = threading.Event()
        self._large_until = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing running, however the test ended."""
        if self.engine.started:
            self.engine.kill()

    def open(self, environment: dict[str, str] | None = None) -> None:
        """Create the tables, start the engine, wait for its journal, put the first rows in."""
        self.shop.create()
        self.start(environment)
        self.await_sight(lambda _: self.watch.journal_exists, "a journal", environment)
        self.shop.open_doors()

    def start(self, environment: dict[str, str] | None = None) -> None:
        self.engine.start("--quiet", environment=environment)

    @contextmanager
    def trading(self, pause: float = 0.002) -> Iterator[None]:
        """The load runs in a thread of its own until the block ends."""
        closing = threading.Event()
        raised: list[BaseException] = []

        def trade() -> None:
            try:
                self.shop.trade(closing, pause, on_error=lambda _: self._expected_outage.is_set())
            except BaseException as error:  # noqa: BLE001 - asserted below
                raised.append(error)

        thread = threading.Thread(target=trade, daemon=True)
        thread.start()
        try:
            yield
        finally:
            closing.set()
            thread.join(120)
        assert not raised, f"the load failed: {raised}"

    def one_large_transaction(self) -> None:
        """Insert more than capture keeps in memory, unless the last such transaction is still on its way."""
        captured = self.watch.look().captured
        if captured >= self._large_until:
            self.database.sql("INSERT INTO visits SELECT i, repeat('large ', 200) FROM generate_series(1, 16000) i")
            self._large_until = captured + 16000

    def expect_outages(self) -> None:
        """From now on the server may go away: the load then reconnects instead of failing."""
        self._expected_outage.set()

    def await_sight(
        self,
        condition: Callable[[Sight], bool],
        what: str,
        environment: dict[str, str] | None = None,
        seconds: float = 240,
    ) -> Sight:
        """Look until the condition holds, starting the engine again whenever it was killed."""
        tick, until = threading.Event(), time.monotonic() + seconds
        while True:
            sight = self.watch.look()
            if condition(sight):
                return sight
            if not self.engine.running:
                assert self.engine.wait(1) == -signal.SIGKILL, f"the engine ended by itself:\n{self.log_tail()}"
                self.start(environment)
            assert time.monotonic() < until, f"{what} not seen within {seconds} s; {sight}\n{self.log_tail()}"
            tick.wait(0.1)

    def drain(self, by: signal.Signals = signal.SIGTERM) -> None:
        """Stop cleanly, by that signal, then deliver everything that is committed now in an engine of its own."""
        if self.engine.running:
            assert self.engine.stop(120, by) == 0, self.log_tail()
        self.engine.start("--once", "--quiet")
        assert self.engine.wait(240) == 0, self.log_tail()

    def prove(self) -> LogProof:
        """Assert that the delivered changelog is exact and that its fold is the source."""
        assert verify(self.home.journal_path("shop")) == []
        log, tables = prove_locally(self.database.uri, self.home, "shop", self.path)
        assert log.exact, log
        assert all(table.equal for table in tables), [table for table in tables if not table.equal]
        assert unlisted_files(self.path) == []
        assert log.changes > 1000, "too little was in flight for the proof to mean anything"
        return log

    def victim(self, kind: str) -> int | None:
        """The process id of `capture`, `driver` or a Python `worker`, if there is one now."""
        if kind == "driver":
            return self.engine.pid
        marks = {"capture": "millstream.engine.capture_process", "worker": "millstream.spark.daemon"}
        matching = [pid for pid in descendants(self.engine.pid) if marks[kind] in command_line(pid)]
        return matching[-1] if matching else None

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.engine.log.read_text(errors="replace").splitlines()[-lines:])


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def unlisted_files(path: Path) -> list[str]:
    """Parquet files that a reader of the directory would see, though no commit lists them."""
    listed = {
        str(path / file["path"])
        for commit in (path / "_millstream" / "commits").glob("*.json")
        for file in json.loads(commit.read_text())["files"]
    }
    return [str(file) for file in path.glob("*/*.parquet") if str(file) not in listed]
