"""A table's changes as DataFrames, straight from a database: no stream file, no target.

A capture process of its own fills a journal, and the public format reads it. `changes` starts both;
what it gives back says where the one is and stops the other.
"""

from __future__ import annotations

import atexit
import hashlib
import shutil
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from millstream.engine.capture_order import CaptureOrder
from millstream.engine.holders import holders
from millstream.engine.home import Home
from millstream.engine.supervisor import Supervisor
from millstream.errors import ConfigError, HomeLocked, MillstreamError, SourceUnavailable, UnknownName
from millstream.journal import JournalReader, journal_exists
from millstream.model import AckPolicy, Relation, SourceSpec
from millstream.names import instead
from millstream.observe import Event, Level, Observer, Observers
from millstream.sources import open_source, remove_source
from millstream.state.base import StateStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

TEND_SECONDS = 15.0
"""How often capture is told what it may let go of."""
PLAN_SECONDS = 60.0
"""Readers find a rewritten segment again by themselves; within this time they need not."""

_SCHEMES = {"postgresql": "postgres", "postgres": "postgres"}


def changes(
    spark: SparkSession,
    source: SourceSpec | str,
    table: str | None = None,
    *,
    home: Home | Path | str | None = None,
    observer: Observer | None = None,
    timeout: float = 30.0,
) -> Changes:
    """Capture a source and give its changes as DataFrames, from the moment of the first call on.

    `source` is a URI, whose `table` then is captured, or a `SourceSpec`, of whose tables one is read, or
    all of them in an envelope when `table` is None. With a `home` the journal stays there: the next call
    goes on where capture stopped, and the source keeps its log until then. Without one it is temporary:
    `stop` removes the journal, and slot and publications from the source. Several calls for the same
    source and home share one capture; a home that another process runs streams on is only read.

    Returns when capture runs. Raises what keeps it from doing so, within `timeout` seconds.
    """
    temporary = home is None
    place = Home(tempfile.mkdtemp(prefix="millstream-changes-")) if home is None else _home(home)
    try:
        spec = _spec(source, table, place)
        relation = _described(spec, table)
        capture = _captures.take(spec, place, observer or Observers(), timeout, temporary=temporary)
    except BaseException:
        if temporary:
            shutil.rmtree(place.path, ignore_errors=True)
        raise
    return Changes(spark, str(place.journal_path(spec.name)), relation, capture)


class Changes:
    """A running capture and its changes. A context manager; `stop` otherwise, or the end of the program."""

    def __init__(self, spark: SparkSession, journal: str, relation: Relation | None, capture: _Capture) -> None:
        self.journal = journal
        """The journal's directory, for `format("millstream")` and everything else that reads journals."""
        self._spark = spark
        self._relation = relation
        self._capture = capture
        self._stopped = False
        atexit.register(self.stop)

    def stream(self, **options: object) -> DataFrame:
        """A streaming DataFrame. Options are those of the format; without a start it begins with the earliest."""
        frame: DataFrame = self._reader(self._spark.readStream, options).load()
        return frame

    def batch(self, **options: object) -> DataFrame:
        """What is in the journal now, as a DataFrame; options as for `stream`."""
        frame: DataFrame = self._reader(self._spark.read, options).load()
        return frame

    @property
    def error(self) -> MillstreamError | None:
        """Why capture has ended for good, or what it is waiting out; None while all is well."""
        return self._capture.error

    def stop(self) -> None:
        """Stop capture, if nobody else uses it. Idempotent. Stop your queries first if it is a temporary one."""
        if not self._stopped:
            self._stopped = True
            atexit.unregister(self.stop)
            _captures.give_back(self._capture)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _reader(self, reader: Any, options: dict[str, object]) -> Any:
        if self._stopped:
            raise ConfigError("these changes were stopped")
        given = {"journal": self.journal, **options}
        if self._relation is not None:
            given["table"] = self._relation.table
            reader = reader.schema(_columns(self._relation))
        if not any(name.lower().startswith("starting") for name in options):
            given["startingSeq"] = "earliest"
        return reader.format("millstream").options(**given)


def _home(home: Home | Path | str) -> Home:
    return home if isinstance(home, Home) else Home(home)


def _spec(source: SourceSpec | str, table: str | None, home: Home) -> SourceSpec:
    """The source as it is captured: the journal alone decides what may be acknowledged, there are no targets."""
    if isinstance(source, SourceSpec):
        return replace(source, ack=AckPolicy.JOURNALED)
    parts = urlsplit(source)
    if parts.scheme not in _SCHEMES:
        raise ConfigError("the source is neither a SourceSpec nor a URI such as postgresql://user@host/database")
    if table is None:
        raise ConfigError("which table? with a URI for a source, give `table`; for several, give a SourceSpec")
    # A slot, and a journal, of its own for each home, database and table; whatever the password is now.
    facts = f"{home.path}\n{parts.hostname}\n{parts.port}\n{parts.path}\n{parts.query}\n{table}"
    name = f"changes_{hashlib.sha256(facts.encode()).hexdigest()[:12]}"
    return SourceSpec(name, _SCHEMES[parts.scheme], source, None, (table,), ack=AckPolicy.JOURNALED)


def _described(spec: SourceSpec, table: str | None) -> Relation | None:
    """The table as the source has it now: a journal knows a table only when it has changed for the first time."""
    source = open_source(spec)
    try:
        found = {relation.table: relation for relation in source.relations(spec.tables)}
    finally:
        source.close()
    if table is None or table in found:
        return found[table] if table is not None else None
    there = instead(table, sorted(found))
    raise UnknownName(f"source {spec.name} has no table {table} among those that are captured: {there}")


def _columns(relation: Relation) -> StructType:
    from pyspark.sql.pandas.types import from_arrow_schema

    from millstream import changelog

    return from_arrow_schema(changelog.schema(relation))


class _Held:
    """A home that this process holds for its captures: its lock and its state."""

    def __init__(self, home: Home) -> None:
        self.users = 0
        self._held = ExitStack()
        self._held.enter_context(home.lock())
        self.store = home.open_state()
        self._held.callback(self.store.close)

    def give_back(self) -> None:
        self.users -= 1
        if not self.users:
            self._held.close()


class _Capture:
    """A capture that handles share. Only `_Captures` starts and ends one."""

    def __init__(self, spec: SourceSpec, home: Home, observer: Observer, *, temporary: bool) -> None:
        self.spec = spec
        self.home = home
        self.users = 0
        self.held: _Held | None = None
        """None when another process runs streams on the home: its capture is the one that counts."""
        self._path = home.journal_path(spec.name)
        self._observer = observer
        self._temporary = temporary
        self._supervisor: Supervisor | None = None
        self._over = threading.Event()
        self._tending: threading.Thread | None = None

    @property
    def error(self) -> MillstreamError | None:
        return self._supervisor.error if self._supervisor else None

    def start(self, held: _Held, timeout: float) -> None:
        """Start the process and wait until it captures. Raises what keeps it from that, and has ended then."""
        self.held = held
        held.users += 1
        self._supervisor = Supervisor(CaptureOrder(self.spec, self._path), self._observer)
        self._supervisor.start()
        self._supervisor.wait_for(lambda it: it.state in ("running", "halted"), timeout)
        if self._supervisor.state != "running":
            late = SourceUnavailable(f"capture of {self.spec.name} does not run after {timeout:g} seconds")
            failed = self._supervisor.error or late
            self.end()
            raise failed
        self._tending = threading.Thread(target=self._tend, args=(self._supervisor, held.store), daemon=True)
        self._tending.start()

    def end(self) -> None:
        """Stop, let go of everything, and leave nothing of a temporary one."""
        self._over.set()
        if self._tending is not None:
            self._tending.join()
        if self._supervisor is not None:
            self._supervisor.stop()
        if self.held is not None:
            self.held.give_back()
        if self._temporary:
            self._forget()

    def _forget(self) -> None:
        shutil.rmtree(self.home.path, ignore_errors=True)
        try:
            remove_source(self.spec)
        except MillstreamError as left:
            what = f"the source {self.spec.name} still has the slot of a capture that is over: {left.message}"
            self._observer.on_event(Event("changes.slot_left", what, Level.WARNING, fields={"hint": left.hint}))

    def _tend(self, supervisor: Supervisor, store: StateStore) -> None:
        """What a run of streams tells its captures: which old files and, if there are limits, changes may go."""
        reader = JournalReader([str(self._path)])
        while not self._over.wait(TEND_SECONDS):
            supervisor.send_planned_before(time.time() - PLAN_SECONDS)
            head = reader.head()
            if (self.spec.retention or self.spec.journal) and head is not None:
                needing = holders(store, self.spec.name, reader.header())
                lowest = needing[0].seq if needing else head.seq
                supervisor.send_needs(lowest, lowest)


class _Captures:
    """The captures of this process, by home and source."""

    def __init__(self) -> None:
        self._running: dict[tuple[Path, str], _Capture] = {}
        self._lock = threading.Lock()

    def take(self, spec: SourceSpec, home: Home, observer: Observer, timeout: float, *, temporary: bool) -> _Capture:
        """The capture of this source on this home, running."""
        key = (home.path, spec.name)
        with self._lock:
            found = self._running.get(key)
            if found is None:
                found = _Capture(spec, home, observer, temporary=temporary)
                self._start(found, timeout)
                self._running[key] = found
            elif found.spec != spec:
                raise ConfigError(
                    f"source {spec.name} is captured already, but described differently",
                    hint="stop the other one first, or give this source another name",
                )
            found.users += 1
            return found

    def give_back(self, capture: _Capture) -> None:
        """One user less; the last one ends it."""
        with self._lock:
            capture.users -= 1
            if not capture.users:
                del self._running[capture.home.path, capture.spec.name]
                capture.end()

    def _start(self, capture: _Capture, timeout: float) -> None:
        home = capture.home
        ours = (other.held for other in self._running.values() if other.home.path == home.path and other.held)
        try:
            held = next(ours, None) or _Held(home)
        except HomeLocked:
            if not journal_exists(home.journal_path(capture.spec.name)):
                raise
            return
        capture.start(held, timeout)


_captures = _Captures()
