"""The demo from the first to the last act: a real database, a live load, a pause, a crash, a proof.

1  start two embedded Postgres servers: a shop with full tables, and an empty one
2  start `millstream run` in a process of its own: full tables, then every change, to Parquet, Delta, the other Postgres
3  pause the lake for a while, and let it catch up
4  kill -9 the whole engine in the middle of the load, start it again
5  close the shop, and let `millstream verify` compare every row of every table at every target
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psycopg
from rich.console import Console

from millstream.demo.engine import Engine
from millstream.demo.picture import Picture
from millstream.demo.shop import TABLES, Shop
from millstream.embedded import EmbeddedPostgres
from millstream.engine.engine import Engine as Streams
from millstream.engine.home import Home
from millstream.engine.stream_status import StreamStatus
from millstream.engine.verify_report import VerifyReport
from millstream.engine.verifying import verify
from millstream.errors import DependencyError, MillstreamError
from millstream.model import StreamState
from millstream.observe import Observers

STREAM = "shop"
PAUSED = "lake"

STREAM_FILE = """\
name: shop
source:
  kind: postgres
  uri: {uri}
  tables: ["public.*"]
mode: snapshot_then_cdc
targets:
  - {{name: log, kind: files, path: {log}, format: parquet, batch: {{max_ms: 500ms}}}}
  - {{name: lake, kind: delta, path: {lake}, batch: {{max_ms: 2s}}}}
  - {{name: copy, kind: postgres, uri: "{copy}"}}
"""

Condition = Callable[[StreamStatus], bool]


@dataclass(frozen=True)
class Outcome:
    """How the demo ended: what was done, and whether source and targets are equal."""

    transactions: int
    changes: int
    seconds: float
    killed: int
    report: VerifyReport

    @property
    def equal(self) -> bool:
        return self.report.equal


class Play:
    """One performance. `seconds` is how long the load runs; the pause and the crash are in the middle of it."""

    def __init__(self, directory: Path, console: Console, seconds: float, seed: int) -> None:
        self._directory = directory
        self._console = console
        self._seconds = seconds
        self._home = Home(directory / "home")
        self._streams = Streams(self._home)
        self._seed = seed
        self._killed = 0

    def perform(self) -> Outcome:
        began = time.monotonic()
        _need_deltalake()
        self._say("Starting two embedded Postgres servers")
        with ExitStack() as stack:
            source, other = (stack.enter_context(EmbeddedPostgres()) for _ in range(2))
            for server, name in ((source, "shop"), (other, "copy")):
                with psycopg.connect(server.uri(), autocommit=True) as connection:
                    connection.execute(f"CREATE DATABASE {name}".encode())
            # A table that is rewritten while it is copied is copied anew: on a busy machine that would go on and on.
            shop = Shop(source.uri("shop"), self._seed, empties_carts_every=5.0)
            shop.create()
            rows = shop.fill()
            self._say(f"A shop of {len(TABLES)} tables and {rows:,} rows at {source.uri('shop')}")
            engine = self._engine(source.uri("shop"), other.uri("copy"))
            stack.callback(lambda: engine.kill() if engine.running else None)
            self._replicate(engine, shop, source.uri("shop"))
            report = self._prove()
            changes = self._streams.get_status(STREAM).source.end_seq or 0
            code = engine.stop()
            if code != 0:
                raise self._broken(f"the engine ended with exit code {code}")
        return Outcome(shop.tally.transactions, changes, time.monotonic() - began, self._killed, report)

    def _engine(self, uri: str, copy: str) -> Engine:
        log, lake = (json.dumps(str(self._directory / name)) for name in ("log", "lake"))
        stream_file = self._directory / "shop.yaml"
        stream_file.write_text(STREAM_FILE.format(uri=uri, log=log, lake=lake, copy=copy))
        return Engine(stream_file, self._home.path, self._directory / "engine.log")

    def _replicate(self, engine: Engine, shop: Shop, uri: str) -> None:
        self._say("Starting `millstream run`: full tables first, then every change (Spark needs some seconds)")
        engine.start()
        closing, failure = threading.Event(), _Failure()
        load = threading.Thread(
            target=failure.guard(lambda: shop.trade(closing, pause=0.002)), name="load", daemon=True
        )
        load.start()
        with Picture(self._console, shop.tally) as picture:
            watch = _Watch(self, engine, picture)
            watch.wait("the first rows are on their way", _all_begun, 120)
            watch.wait_for("every change goes to three targets", self._seconds / 4)
            self._streams.pause(STREAM, PAUSED)
            watch.wait_for(f"`millstream pause {STREAM} --target {PAUSED}`: the others flow on", self._seconds / 4)
            self._streams.resume(STREAM, PAUSED)
            watch.wait_for(f"`millstream resume`: the {PAUSED} catches up", self._seconds / 4)
            self._killed = engine.kill()
            engine.start()
            started = time.time()
            text = f"kill -9 of the whole engine ({self._killed} processes); the shop goes on, the engine starts again"
            watch.wait(text, lambda status: _is_back(status, started), 120)
            watch.wait_for("back: nothing was lost, nothing comes twice", self._seconds / 4)
            closing.set()
            load.join(30)
            failure.check()
            watch.wait("the shop is closed; the rest is delivered", _has_all(_log_end(uri)), 120)

    def _prove(self) -> VerifyReport:
        self._say(f"`millstream verify {STREAM}`: every row of every table, at each target, against the source")
        with self._console.status("comparing") as line:
            return verify(
                self._home,
                STREAM,
                target=None,
                tables=(),
                repair=False,
                observers=Observers(),
                on_progress=lambda text: line.update(text or "comparing"),
            )

    def status(self) -> StreamStatus | None:
        """How the stream is; None while nobody can say."""
        try:
            return self._streams.get_status(STREAM)
        except MillstreamError:
            return None

    def _say(self, message: str) -> None:
        self._console.print(f"[cyan]•[/] {message}", highlight=False, soft_wrap=True)

    def _broken(self, message: str) -> MillstreamError:
        log = self._directory / "engine.log"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:]) if log.exists() else ""
        return MillstreamError(f"{message}; the end of the engine's log:\n{tail}", hint=f"the whole log is {log}")


class _Watch:
    """Looks at the stream four times a second, and shows it."""

    def __init__(self, play: Play, engine: Engine, picture: Picture) -> None:
        self._play = play
        self._engine = engine
        self._picture = picture

    def wait_for(self, phase: str, seconds: float) -> None:
        until = time.monotonic() + seconds
        self.wait(phase, lambda _: time.monotonic() >= until, seconds + 60)

    def wait(self, phase: str, condition: Condition, timeout: float) -> None:
        until, tick = time.monotonic() + timeout, threading.Event()
        while True:
            status = self._play.status()
            self._picture.show(phase, status)
            if status is not None and condition(status):
                return
            if not self._engine.running:
                raise self._play._broken("the engine ended by itself")
            if time.monotonic() > until:
                raise self._play._broken(f"it took more than {timeout:.0f} s until {phase}")
            tick.wait(0.25)


class _Failure:
    """Carries what a thread raised to the thread that waits for it."""

    def __init__(self) -> None:
        self._raised: BaseException | None = None

    def guard(self, work: Callable[[], None]) -> Callable[[], None]:
        def guarded() -> None:
            try:
                work()
            except BaseException as raised:  # noqa: BLE001 - handed on, not swallowed
                self._raised = raised

        return guarded

    def check(self) -> None:
        if self._raised is not None:
            raise self._raised


def _all_begun(status: StreamStatus) -> bool:
    """Every target has its full tables, and changes after them."""
    return all(target.batches > 0 for target in status.targets)


def _is_back(status: StreamStatus, since: float) -> bool:
    fresh = status.reported_at is not None and status.reported_at.timestamp() > since
    working = (StreamState.RUNNING, StreamState.CATCHING_UP)
    return fresh and all(target.state in working and target.batches > 0 for target in status.targets)


def _has_all(end: int) -> Condition:
    """Every target has everything up to this position of the source's log."""

    def check(status: StreamStatus) -> bool:
        covered = status.source.end_position
        high, _, low = (covered or "0/0").partition("/")
        return (int(high, 16) << 32) + int(low, 16) >= end and all(target.lag_events == 0 for target in status.targets)

    return check


def _log_end(uri: str) -> int:
    """The end of the database's log now, as a number."""
    with psycopg.connect(uri, autocommit=True) as connection:
        row = connection.execute("SELECT (pg_current_wal_lsn() - '0/0'::pg_lsn)::bigint").fetchone()
    return int(row[0]) if row else 0


def _need_deltalake() -> None:
    try:
        import deltalake  # noqa: F401 - only to see that it is there
    except ImportError as missing:
        raise DependencyError(
            "the demo mirrors into Delta tables, and deltalake is not installed",
            hint="pip install 'millstream[delta,embedded]'",
        ) from missing
