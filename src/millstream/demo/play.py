"""The demo from the first to the last act: a real database, a live load, a crash, a proof.

1  start an embedded Postgres and an empty shop
2  start `millstream run` in a process of its own, open the doors, let the load run
3  kill -9 the whole engine in the middle of it, start it again
4  stop the load, wait until everything is delivered, stop the engine with SIGTERM
5  fold the changelog with Spark and let Postgres compare every row of every table
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psycopg
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from millstream.demo.engine import Engine
from millstream.demo.proof import LogProof, TableProof, prove_with_spark
from millstream.demo.shop import TABLES, Shop
from millstream.demo.watch import Sight, Watch
from millstream.embedded import EmbeddedPostgres
from millstream.engine.home import Home
from millstream.errors import MillstreamError

STREAM = "shop"

STREAM_FILE = """\
name: shop
source:
  kind: postgres
  uri: {uri}
  tables: ["public.*"]
mode: cdc
targets:
  - {{name: log, kind: files, path: {path}, format: parquet, batch: {{max_ms: 500ms}}}}
"""


@dataclass(frozen=True)
class Outcome:
    """How the demo ended: what was done and whether source and target are equal."""

    transactions: int
    seconds: float
    killed: int
    log: LogProof
    tables: tuple[TableProof, ...]

    @property
    def equal(self) -> bool:
        return self.log.exact and all(table.equal for table in self.tables)


class Play:
    """One performance. `seconds` is how long the load runs, the crash is in the middle of it."""

    def __init__(self, directory: Path, console: Console, seconds: float, seed: int) -> None:
        self._directory = directory
        self._console = console
        self._seconds = seconds
        self._home = Home(directory / "home")
        self._lake = directory / "log"
        self._seed = seed
        self._rates: deque[tuple[float, int]] = deque(maxlen=20)
        self._phase = ""
        self._killed = 0

    def perform(self) -> Outcome:
        began = time.monotonic()
        self._say("Starting an embedded Postgres")
        with EmbeddedPostgres() as server:
            with psycopg.connect(server.uri(), autocommit=True) as connection:
                connection.execute("CREATE DATABASE shop")
            uri = server.uri("shop")
            shop = Shop(uri, self._seed)
            shop.create()
            self._say(f"An empty shop of {len(TABLES)} tables at {uri}")
            stream_file = self._directory / "shop.yaml"
            stream_file.write_text(STREAM_FILE.format(uri=uri, path=json.dumps(str(self._lake))))
            engine = Engine(stream_file, self._home.path, self._directory / "engine.log")
            try:
                self._replicate(engine, shop, uri)
            finally:
                if engine.running:
                    engine.kill()
            self._say("Folding the changelog with Spark; Postgres compares every row")
            log, tables = prove_with_spark(uri, self._home, STREAM, self._lake)
        return Outcome(shop.tally.transactions, time.monotonic() - began, self._killed, log, tuple(tables))

    def _replicate(self, engine: Engine, shop: Shop, uri: str) -> None:
        watch = Watch(self._home, STREAM, self._lake)
        self._say("Starting `millstream run` (Spark needs some seconds)")
        engine.start()
        self._await(engine, watch, lambda sight: watch.journal_exists, 60, "capture did not start")
        shop.open_doors()
        closing, failure = threading.Event(), _Failure()
        load = threading.Thread(
            target=failure.guard(lambda: shop.trade(closing, pause=0.002)), name="load", daemon=True
        )
        with Live(console=self._console, refresh_per_second=4, transient=not self._console.is_terminal) as live:
            load.start()
            self._phase = "replicating"
            self._await(engine, watch, lambda sight: sight.delivered > 0, 90, "nothing was delivered", live, shop)
            self._watch_for(engine, watch, self._seconds / 2, live, shop)
            self._killed = engine.kill()
            self._phase = f"kill -9 of the whole engine ({self._killed} processes), the shop goes on; starting again"
            before = watch.look().delivered
            engine.start()
            self._await(engine, watch, lambda sight: sight.delivered > before, 90, "no recovery", live, shop)
            self._phase = "replicating again, after the crash"
            self._watch_for(engine, watch, self._seconds / 2, live, shop)
            closing.set()
            load.join(30)
            failure.check()
            self._phase = "the shop is closed; delivering the rest"
            end = _log_end(uri)
            delivered: Callable[[Sight], bool] = lambda sight: sight.covered >= end and sight.lag == 0  # noqa: E731
            self._await(engine, watch, delivered, 120, "the rest was not delivered", live, shop)
            self._phase = "all delivered"
            live.update(self._picture(watch, watch.look(), shop))
        code = engine.stop()
        if code != 0:
            raise self._broken(f"the engine ended with exit code {code}")

    def _watch_for(self, engine: Engine, watch: Watch, seconds: float, live: Live, shop: Shop) -> None:
        until = time.monotonic() + seconds
        self._await(engine, watch, lambda sight: time.monotonic() >= until, seconds + 60, "", live, shop)

    def _await(
        self,
        engine: Engine,
        watch: Watch,
        condition: Callable[[Sight], bool],
        timeout: float,
        problem: str,
        live: Live | None = None,
        shop: Shop | None = None,
    ) -> None:
        """Look four times a second, show it, until the condition holds."""
        until, tick = time.monotonic() + timeout, threading.Event()
        while True:
            sight = watch.look()
            self._rates.append((time.monotonic(), sight.delivered))
            if live is not None and shop is not None:
                live.update(self._picture(watch, sight, shop))
            if condition(sight):
                return
            if not engine.running:
                raise self._broken("the engine ended by itself")
            if time.monotonic() > until:
                raise self._broken(f"{problem} within {timeout:.0f} s")
            tick.wait(0.25)

    def _picture(self, watch: Watch, sight: Sight, shop: Shop) -> Group:
        (first, low), (last, high) = self._rates[0], self._rates[-1]
        rate = (high - low) / (last - first) if last > first else 0.0
        head = Text.assemble(
            (self._phase, "bold"),
            f"\ncommitted {shop.tally.transactions:,} transactions · captured {sight.captured:,} changes · delivered "
            f"{sight.delivered:,} · {rate:,.0f} changes/s · lag {sight.lag:,}",
        )
        table = Table("table", box=None, pad_edge=False, header_style="dim")
        table.add_column("changes delivered", justify="right")
        for name in sorted(watch.changes):
            table.add_row(name, f"{watch.changes[name]:,}")
        return Group(head, table)

    def _say(self, message: str) -> None:
        self._console.print(f"[cyan]•[/] {message}", highlight=False)

    def _broken(self, message: str) -> MillstreamError:
        log = self._directory / "engine.log"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:]) if log.exists() else ""
        return MillstreamError(f"{message}; the end of the engine's log:\n{tail}", hint=f"the whole log is {log}")


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


def _log_end(uri: str) -> int:
    """The end of the database's log now, as a number."""
    with psycopg.connect(uri, autocommit=True) as connection:
        row = connection.execute("SELECT (pg_current_wal_lsn() - '0/0'::pg_lsn)::bigint").fetchone()
    return int(row[0]) if row else 0
