"""The streams that a process runs: one capture per source, one query per stream and target.

One thread, the *control*, changes what runs; a second one, the *ticker*, acknowledges and reports meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from millstream.config.definition import from_definition
from millstream.engine.captures import Capture
from millstream.engine.delivery import BROKEN, DeliveryQuery
from millstream.engine.fit import open_target, tell_executors
from millstream.engine.home import Home
from millstream.engine.members import Delivery, Member, Roster, is_paused
from millstream.engine.reload import given_up
from millstream.engine.ticker import Ticker
from millstream.engine.uncaptured import Uncaptured
from millstream.engine.verify import Place
from millstream.errors import MillstreamError, NotReady, SparkEnded
from millstream.failpoint import failpoint
from millstream.model import Mode, StreamSpec, StreamState, TargetSpec
from millstream.observe import Event, Level, Observer
from millstream.spark.probe import is_local
from millstream.spark.shelf import Shelf
from millstream.spark.tables import OwnTables
from millstream.state.base import StateStore
from millstream.targets.base import Target

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Held:
    """A target to which nothing is delivered, and what somebody who compares it needs."""

    spark: SparkSession
    stream: StreamSpec
    target: TargetSpec
    place: Place


class RunningStreams:
    """What runs. All methods are the control's, except for those that say otherwise."""

    def __init__(
        self,
        home: Home,
        store: StateStore,
        spark: Callable[[], SparkSession],
        observer: Observer,
        *,
        stopping: threading.Event,
        once: bool = False,
        deliver: bool = True,
    ) -> None:
        """`deliver`: whether targets get changes, and sources are not only captured.

        `stopping` is set from elsewhere when the process shall end: nothing more is started then.
        """
        self._stopping = stopping
        self._home = home
        self._store = store
        self._spark = spark
        self._observer = observer
        self._once = once
        self._deliver = deliver
        self._roster = Roster()
        self._ticker = Ticker(self._roster, store, observer)
        self._fit: set[str] = set()
        """Sources whose journal the executors of the cluster were seen to reach."""
        self._shelf_is_ready = False
        self.on_leaving: Callable[[str], None] = lambda stream: None
        """Called before a stream, or the delivery to a target of it, is changed or ended."""

    # What runs

    @property
    def members(self) -> list[Member]:
        return self._roster.members

    @property
    def captures(self) -> list[Capture]:
        return self._roster.captures

    @property
    def queries(self) -> list[DeliveryQuery]:
        return self._roster.queries

    def spec(self, name: str) -> StreamSpec | None:
        """A stream as it was given to this process: with the password that may stand in its URI."""
        found = self._roster.by_name.get(name)
        return found.spec if found else None

    # Changes of what runs

    def put(self, streams: Iterable[StreamSpec]) -> None:
        """Run these streams; one that runs already, and is not the same any more, from its cursors on."""
        for stream in streams:
            member = self._roster.by_name.get(stream.name)
            if member is not None and member.spec != stream:
                self.on_leaving(stream.name)
                # A target that stays as it is goes on without a break, unless it gets other rows from now on.
                before = (member.spec.shape, member.spec.source.tables)
                reshaped = before != (stream.shape, stream.source.tables)
                changed = {one.name for one in member.spec.targets if reshaped or one not in stream.targets}
                member.stop(changed)
                member.spec = stream
                member.unfit.clear()
            self._roster.by_name.setdefault(stream.name, Member(stream))
        self._arrange()

    def remove(self, name: str) -> None:
        """Run this stream no more. Returns when its batches have ended; its capture too, if nobody else needs it."""
        self.on_leaving(name)
        with self._ticker.silent():
            # From here on nothing is written down of it any more: its state may be removed.
            member = self._roster.by_name.pop(name, None)
        if member is not None:
            member.stop(member.deliveries)
        self._arrange()

    def stop_targets(self, name: str, targets: Iterable[str]) -> None:
        """End the delivery to these targets. Returns when their batches have ended."""
        self.on_leaving(name)
        member = self._roster.by_name.get(name)
        if member is not None:
            member.stop(targets)

    def hold(self, name: str, target: str) -> Held:
        """End the delivery to a target, and do not start it again before `let_go`. Returns when its batch has ended."""
        member = self._roster.by_name.get(name)
        spec = next((one for one in member.spec.targets if one.name == target), None) if member else None
        if member is None or spec is None:
            raise NotReady(f"stream {name} with a target {target} does not run here")
        capture = self._roster.by_source[member.spec.source.name]
        self._roster.held[name, target] = ""
        member.stop([target])
        self.report()
        place = Place(capture.locations, self._home.checkpoint_path(name, target), self._own_tables(member.spec))
        return Held(self._spark(), member.spec, spec, place)

    def say(self, name: str, target: str, text: str) -> None:
        """How far the comparison of a held target is. From any thread."""
        if (name, target) in self._roster.held:
            self._roster.held[name, target] = text

    def comparing(self, name: str) -> str:
        """The same to be read: of which target of the stream, and how far. From any thread."""
        return next((f"{target}: {text}" for target, text in self._roster.held_of(name).items() if text), "")

    def let_go(self, name: str, target: str) -> None:
        """Deliver on to a target that was held. From any thread."""
        self._roster.held.pop((name, target), None)

    def start_anew(self, name: str) -> None:
        """Give what has failed of this stream, or of its capture, another try."""
        member = self._roster.by_name.get(name)
        if member is None:
            return
        member.stop([n for n, query in member.queries.items() if query.done])
        member.unfit.clear()
        capture = self._roster.by_source[member.spec.source.name]
        if capture.error is not None:
            capture.failure = None
            if capture.started:
                capture.restart()

    def _arrange(self) -> None:
        """Let each capture serve exactly the streams that the home has on its source."""
        deleting = self._store.deletions()
        streams = [self._known(name) for name in self._store.list_streams() if name not in deleting]
        needed = {member.spec.source.name: member.spec.source for member in self.members}
        for name in [name for name in self._roster.by_source if name not in needed]:
            self._roster.by_source.pop(name).forget()
        for name, source in needed.items():
            sharing = [stream for stream in streams if stream.source.name == name]
            tables = dict.fromkeys(pattern for stream in sharing for pattern in stream.source.tables)
            whole = replace(source, tables=tuple(tables))
            self._store.add_captured(name, whole.tables)
            failpoint("engine.patterns_saved")
            for member in self.members:
                if member.spec.source.name == name:
                    own = self._own_tables(member.spec)
                    member.stop([t for t, one in member.deliveries.items() if one.tables != own])
            if name in self._roster.by_source:
                self._roster.by_source[name].change(whole, sharing)
            else:
                copied = all(stream.mode is Mode.SNAPSHOT for stream in sharing)
                kind = Uncaptured if copied else Capture
                self._roster.by_source[name] = kind(whole, sharing, self._home, self._store, self._observer)

    def _own_tables(self, stream: StreamSpec) -> OwnTables | None:
        """What a delivery is told of its tables. None if there never were others in the journal."""
        captured = tuple(self._store.captured(stream.source.name))
        return None if set(captured) <= set(stream.source.tables) else OwnTables(stream.source.tables, captured)

    def _known(self, name: str) -> StreamSpec:
        given = self.spec(name)
        return given if given is not None else from_definition(self._store.get_stream(name) or {})

    # Starting what is due

    def start_captures(self, *, strict: bool) -> None:
        """Compare cursors and journals, then start the captures that do not run yet. `strict`: raise what is wrong."""
        waiting = [capture for capture in self.captures if not capture.started and capture.failure is None]
        for capture in waiting:
            try:
                capture.check([member.name for member in self._roster.of(capture)])
            except MillstreamError as failed:
                if strict:
                    capture.failure = failed
                    raise
                capture.halt(failed)
        for capture in waiting:
            if capture.failure is None:
                capture.start()

    def advance(self, *, strict: bool = False) -> bool:
        """Start what can be started now, and say whether all runs that should. `strict`: raise what keeps it off."""
        self.start_captures(strict=strict)
        settled = True
        for capture in self.captures:
            due = self._due(capture)
            if not due:
                continue
            if not self._is_ready(capture, strict=strict):
                settled = False
                continue
            for member, target in due:
                if self._stopping.is_set():
                    return False
                try:
                    capture.check_tables(member.name)
                    made = open_target(target)
                except MillstreamError as failed:
                    if strict:
                        raise
                    member.note_unfit(target.name, failed, self._observer)
                else:
                    self._start(member, target, made, capture)
        for member in self.members:
            member.tell_ready(self._store, self._observer)
        return settled

    def _is_ready(self, capture: Capture, *, strict: bool) -> bool:
        if strict:
            return capture.ready(once=self._once)
        with suppress(MillstreamError):  # it is told by the capture's own state
            return capture.started and capture.ready(once=self._once)
        return False

    def _due(self, capture: Capture) -> list[tuple[Member, TargetSpec]]:
        return [
            (member, target)
            for member in self._roster.of(capture)
            for target in member.spec.targets
            # The store is asked last, and not ten times a second while all that should run does.
            if self._deliver
            and target.name not in (member.deliveries | member.unfit)
            and (member.name, target.name) not in self._roster.held
            and target.name not in given_up(self._store, member.name)
            and not is_paused(self._store, member.name, target.name)
        ]

    def _start(self, member: Member, target: TargetSpec, made: Target, capture: Capture) -> None:
        spark = self._spark()
        self._look_at_executors(spark, capture)
        tables = self._own_tables(member.spec)
        query = DeliveryQuery(
            spark,
            member.spec,
            target,
            made,
            capture.locations,
            self._store,
            self._home.checkpoint_path(member.name, target.name),
            self._observer,
            once=self._once,
            on_cursor=lambda _: self._ticker.wake(),
            tables=tables,
            shelf=self._shelf(spark, capture),
            deliveries=sum(len(one.spec.targets) for one in self._roster.members),
        )
        member.deliveries[target.name] = Delivery(query, tables)
        query.start()
        self.report()

    def _shelf(self, spark: SparkSession, capture: Capture) -> Shelf | None:
        """Where the targets of a source share what they decode, if there are several, and all on this machine."""
        readers = sum(len(member.spec.targets) for member in self._roster.of(capture))
        if readers < 2 or not is_local(spark):
            return None
        shelf = Shelf(str(self._home.spark_path / "decoded"), readers)
        if not self._shelf_is_ready:
            # What an earlier process has left may not be whole: the system may have gone down with it.
            shelf.prepare()
            self._shelf_is_ready = True
        return shelf

    def _look_at_executors(self, spark: SparkSession, capture: Capture) -> None:
        """Tell before the first batch if a cluster is not fit. On one host there is nothing that could differ."""
        if capture.source.name not in self._fit and not is_local(spark):
            locations = () if isinstance(capture, Uncaptured) else capture.locations
            tell_executors(spark, locations, self._observer)
            self._fit.add(capture.source.name)

    # How it goes

    def caught_up(self, capture: Capture) -> bool:
        """Whether the targets that run here have all that is in the journal."""
        end = capture.report().source.get("seq") or 0
        cursors = [cursor for member in self._roster.of(capture) for cursor in self._store.cursors(member.name)]
        return all(cursor.seq >= end for cursor in cursors)

    def failed(self) -> bool:
        broken = any(query.state in BROKEN for query in self.queries)
        broken = broken or any(given_up(self._store, member.name) for member in self.members)
        broken = broken or any(member.unfit for member in self.members)
        return broken or any(capture.error is not None for capture in self.captures)

    # The ticker

    def start_ticker(self) -> None:
        """Acknowledge and report from now on, on a thread of its own."""
        self._ticker.start()

    def report(self) -> None:
        """Write down how things are, now. From any thread."""
        self._ticker.report()

    def raise_failure(self) -> None:
        """Raise what the run must end for: the ticker, which acknowledges, has died, or Spark, which delivers, has."""
        ended = next((query.error for query in self.queries if isinstance(query.error, SparkEnded)), None)
        if (failure := self._ticker.failure or ended) is not None:
            raise failure

    # The end

    def stop(self) -> None:
        """Finish batches, acknowledge what they delivered, say the last word, stop captures."""
        self._ticker.end()
        steps: list[Callable[[], None]] = [query.stop for query in self.queries]
        steps += [self._ticker.join, self._last_words]
        steps += [capture.stop for capture in self.captures]
        for step in steps:
            self.attempt(step)

    def attempt(self, step: Callable[[], None]) -> None:
        """Try one step of an orderly end: the others must be tried too, and exactness rests on none of them."""
        try:
            step()
        except Exception as broken:  # noqa: BLE001 - told
            what = f"a step of the orderly end failed: {type(broken).__name__}"
            self._observer.on_event(Event("run.stop_failed", what, Level.WARNING))

    def _last_words(self) -> None:
        if all(capture.started for capture in self.captures):
            self._ticker.acknowledge()
            self._ticker.report(None if self.failed() else StreamState.STOPPED)
