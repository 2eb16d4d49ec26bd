"""What can be done to the streams of a home: put, pause, resume, delete. Whether or not they run in this process.

Whoever calls this owns the home (`Home.lock`). Each operation writes down what is wanted before it
does anything about it, and can be repeated: one that was interrupted is finished by the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from millstream.config.definition import definition, from_definition
from millstream.engine.admission import check_streams
from millstream.engine.deletion import Deletion
from millstream.engine.fit import open_target
from millstream.engine.following import Following
from millstream.engine.home import Home
from millstream.engine.leaving import Leaving
from millstream.engine.redelivery import Outcome, Redelivery
from millstream.engine.reload import AskedTables, Reload, ask_for_added
from millstream.engine.replay import Asked, Replay
from millstream.engine.unknown import unknown_stream, unknown_target
from millstream.errors import ConfigError, MillstreamError, NotReady, RequestFailed, UnknownName
from millstream.failpoint import failpoint
from millstream.journal import JournalReader
from millstream.model import Json, StreamSpec
from millstream.observe import Event, Level, Observer, counted
from millstream.state.base import Letter, StateStore

if TYPE_CHECKING:
    # It brings Spark with it, and most commands need none.
    from millstream.engine.running import RunningStreams


class Operations:
    """One thread. `running` is what runs in this process, if anything does."""

    def __init__(
        self, home: Home, store: StateStore, observer: Observer, running: RunningStreams | None = None
    ) -> None:
        self._home = home
        self._store = store
        self._observer = observer
        self._running = running
        self._leaving = Leaving(running) if running is not None else None
        self._following = Following(home, store, self._copy_anew, self._recapture, observer)

    def serve(self) -> None:
        """Go on with what was begun and waited for batches to end; begin what sources' catalogs ask for."""
        if self._leaving is not None:
            self._leaving.serve()
        if self._running is not None:
            self._following.serve([member.spec for member in self._running.members])

    def streams(self) -> list[StreamSpec]:
        """The streams of the home, except for those that are being deleted."""
        gone = self._store.deletions()
        return [self._spec(name) for name in self._store.list_streams() if name not in gone]

    def upsert(self, streams: Sequence[StreamSpec]) -> None:
        """Create or replace streams, all checked before the first is written; they run from then on, if anything does.

        A stream that is the same already is left alone. Raises ConfigError for what cannot be.
        """
        check_streams(self._store, streams, self.streams())
        for stream in streams:
            described, before = definition(stream), self._store.get_stream(stream.name)
            if before != described:
                for target in described["targets"]:
                    if before is None or target not in before["targets"]:
                        # Another place, perhaps: whether it can go on is seen when it is opened.
                        self._store.set_needs_reload(stream.name, target["name"], None)
                if before is not None:
                    self._following.settle(from_definition(before))
                    ask_for_added(self._store, stream, before)
                self._store.put_stream(stream.name, described)
                failpoint("engine.stream_saved")
                done = "created" if before is None else "replaced"
                self._tell("stream.applied", f"stream {stream.name} was {done}", stream.name)
        if self._running is not None:
            self._running.put(streams)
            self._running.report()

    def pause(self, name: str, target: str | None = None) -> Future[Json]:
        """Deliver no more to the target, or to any of the stream. The answer comes when the batch at hand has ended.

        Until then other things can be done: `serve` goes on with this one.
        """
        targets = self._targets(name, target)
        self._store.set_paused(name, target or "", True)
        failpoint("engine.pause_saved")

        def ended() -> Json:
            if self._running is not None:
                self._running.stop_targets(name, targets)
                self._running.report()
            self._tell("stream.paused", f"{self._what(name, target)} is paused", name, target)
            return {}

        return self._after([(name, one) for one in targets], ended)

    def _after(self, targets: Sequence[tuple[str, str]], then: Callable[[], Json]) -> Future[Json]:
        """Do it when the batches at hand of these targets, each named with its stream, have ended."""
        if self._leaving is not None:
            return self._leaving.begin(targets, then)
        done: Future[Json] = Future()
        done.set_result(then())
        return done

    def _idle(self, name: str, target: str | None, verb: str) -> list[str]:
        """The targets that something is to be done to. Raises RequestFailed while one of them is being compared."""
        targets = self._targets(name, target)
        if self._running is not None and self._running.comparing(name):
            raise RequestFailed(f"stream {name} is being compared with its source", hint=f"{verb} after that")
        return targets

    def resume(self, name: str, target: str | None = None) -> None:
        """Go on from the checkpoints. What has failed for good is given another try."""
        targets = self._targets(name, target)
        paused = self._store.paused(name)
        if target is not None and "" in paused:
            # The whole stream was paused: from now on it is all of its targets but this one.
            for other in self._targets(name, None):
                if other != target:
                    self._store.set_paused(name, other, True)
        for one in ["", *targets]:
            self._store.set_paused(name, one, False)
            self._store.set_needs_reload(name, one, None)
        failpoint("engine.resume_saved")
        if self._running is not None:
            self._running.start_anew(name)
            self._running.report()
        self._tell("stream.resumed", f"{self._what(name, target)} goes on", name, target)

    def decide_ddl(self, name: str, id: int | str, *, approved: bool) -> None:
        """Approve or reject a schema change. Delivery that waits for it finds out; what has failed is tried again."""
        from millstream.engine.ddl import decide

        decide(self._home, self._store, self._spec(name), id, approved=approved)
        if approved and self._running is not None:
            self._running.start_anew(name)
        said = "approved" if approved else "rejected"
        self._tell("stream.ddl_decided", f"schema change {id} was {said}", name)

    def replay(self, name: str, asked: Asked, target: str | None = None) -> Future[Json]:
        """Have targets get once more what they have had. A paused one gets it when it goes on.

        Raises NotSupported, NotReady, ConfigError and OutOfRange before anything is changed. As with all that follow,
        the answer comes when the batches at hand have ended; until then other things can be done (`serve`).
        """

        def checked() -> tuple[list[str], Replay]:
            targets = self._idle(name, target, "replay")
            replay = Replay(self._home, self._store, self._spec(name), targets, asked)
            replay.check()
            return targets, replay

        def ended() -> Json:
            targets, replay = checked()
            if self._running is not None:
                self._running.stop_targets(name, targets)
            replay.run()
            self._following.repeat(self._spec(name), targets, replay.seq)
            what = f"{self._what(name, target)} is replayed from seq {replay.seq + 1}"
            self._tell("stream.replayed", what, name, target)
            return {}

        return self._after([(name, one) for one in checked()[0]], ended)

    def restore(self, name: str, target: str, asked: Json) -> Future[Json]:
        """Have a target brought back to a snapshot. A paused one is when it goes on.

        Raises what keeps it from that before anything is changed. The answer is the restore as it is written down.
        """

        def ended() -> Json:
            from millstream.engine.snapshots import Restoring, ask_restore

            self._idle(name, target, "restore")
            stream = self._spec(name)
            (spec,) = [one for one in stream.targets if one.name == target]
            if self._running is not None:
                self._running.stop_targets(name, [target])
            journal = JournalReader([str(self._home.journal_path(stream.source.name))])
            record = ask_restore(self._store, stream, spec, journal, asked)
            if self._running is None:
                record = Restoring(self._store, stream, spec, open_target(spec)).run(record, journal)
            what = f"target {target} is restored from snapshot {record['id']}"
            self._tell("stream.restore_asked", what, name, target)
            return {key: value for key, value in record.items() if key != "token"}

        self._idle(name, target, "restore")
        return self._after([(name, target)], ended)

    def known(self, name: str, target: str | None = None) -> StreamSpec:
        """A stream that is not being deleted. Raises UnknownStream, also for a target that it does not have."""
        self._targets(name, target)
        return self._spec(name)

    def reload(self, name: str, asked: AskedTables, target: str | None = None) -> Future[Json]:
        """Have targets get tables anew while changes go on coming. A paused one gets them when it goes on.

        Raises NotSupported, NotReady and ConfigError before anything is changed.
        """
        self._following.settle(self._spec(name))
        targets = self._idle(name, target, "reload")
        Reload(self._store, self._spec(name), targets, asked).check()

        def ended() -> Json:
            self._ask_reload(name, asked, target)
            if not set(asked.names) <= {total.table for total in self._store.totals(name)}:
                self._recapture(self._spec(name).source.name)
            return {}

        return self._after([(name, one) for one in targets], ended)

    def _ask_reload(self, name: str, asked: AskedTables, target: str | None) -> None:
        self._following.settle(self._spec(name))
        targets = self._idle(name, target, "reload")
        reload = Reload(self._store, self._spec(name), targets, asked)
        reload.check()
        if self._running is not None:
            self._running.stop_targets(name, targets)
        reload.run()
        what = ", ".join(asked.names) or "every table"
        what = what if asked.where is None else f"{what} where {asked.where}"
        self._tell("stream.reloading", f"{self._what(name, target)} gets {what} anew", name, target)

    def _copy_anew(self, stream: StreamSpec, target: str, table: str) -> bool:
        """Have a target get a table anew, since the catalog says that rows of it came, went or changed.

        False if that has to wait. Raises what keeps it from that for good.
        """
        if self._running is not None and self._running.comparing(stream.name):
            return False
        self._ask_reload(stream.name, AskedTables((table,)), target)
        return True

    def _recapture(self, source: str) -> None:
        """Start a source's capture anew: tables that were created since are captured from then on."""
        for capture in self._running.captures if self._running is not None else ():
            if capture.source.name == source and capture.started and capture.error is None:
                capture.restart()

    def retry_letters(self, ids: Sequence[int]) -> Future[Json]:
        """Deliver dead letters once more, each only if its row was not written since. Their targets pause for it.

        Raises UnknownName for an id that is not there, before anything is done. The answer has what became of them,
        as `letters`. One that goes while the batch at hand ends, because that has written its row, is not among them.
        """
        owners: dict[tuple[str, str], list[int]] = {}
        for id, letter in self._letters(ids).items():
            owners.setdefault((letter.stream, letter.target), []).append(id)

        def ended() -> Json:
            outcomes: list[Outcome] = []
            for name, target in owners:
                self._idle(name, target, "retry")
            for (name, target), mine in owners.items():
                if self._running is not None:
                    self._running.stop_targets(name, [target])
                done = Redelivery(self._home, self._store, self._spec(name), target).run(mine)
                counts = Counter(one.outcome for one in done)
                said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
                self._tell("letters.retried", f"{counted(len(done), 'dead letter')} retried: {said}", name, target)
                outcomes += done
            return {"letters": [one.to_json() for one in outcomes]}

        for name, target in owners:
            self._idle(name, target, "retry")
        return self._after(list(owners), ended)

    def purge_letters(self, ids: Sequence[int]) -> int:
        """Forget dead letters: what they would have done is given up. Raises UnknownName as `retry_letters`."""
        owners = Counter((letter.stream, letter.target) for letter in self._letters(ids).values())
        removed = self._store.remove_letters(ids)
        for (name, target), count in owners.items():
            self._tell("letters.purged", f"{counted(count, 'dead letter')} given up", name, target)
        return removed

    def _letters(self, ids: Sequence[int]) -> dict[int, Letter]:
        known = {letter.id: letter for letter in self._store.letters()}
        missing = [str(id) for id in ids if id not in known]
        if missing:
            raise UnknownName(f"there is no dead letter {', '.join(missing)}", hint="see `millstream dlq list`")
        return {id: known[id] for id in ids}

    def stream(self, name: str) -> StreamSpec:
        """The stream as it is run here, or as the home has it."""
        return self._spec(name)

    def comparable(self, name: str, target: str | None = None) -> tuple[str, ...]:
        """The targets of a stream to compare with its source. Raises NotReady for one that is paused."""
        targets = tuple(self._targets(name, target))
        paused = self._store.paused(name)
        for one in targets:
            if not paused.isdisjoint({"", one}):
                raise NotReady(
                    f"target {one} of stream {name} is paused, and a comparison would bring it up to date",
                    hint=f"resume it (millstream resume {name}), or compare another one with --target",
                )
        return targets

    def delete(self, name: str, *, keep_slot: bool = False, keep_target: bool = False) -> Future[Json]:
        """Remove a stream and everything that is kept for it. What was delivered stays where it is.

        The answer is what became of its source and its targets; or SourceUnavailable when the source
        cannot be reached to give the slot back: the deletion is remembered, and the next call goes on.
        """
        targets = [(name, one["name"]) for one in self._definition(name)["targets"]]
        options = {"keep_slot": keep_slot, "keep_target": keep_target}
        self._store.begin_deletion(name, options)
        failpoint("engine.deletion_begun")
        return self._after(targets, lambda: self._finish(name, options))

    def finish_deletions(self) -> None:
        """Go on with what was interrupted. What still cannot be done is told, and stays for the next time."""
        for name, options in self._store.deletions().items():
            try:
                self._finish(name, options)
            except MillstreamError as failed:
                message = f"stream {name} is not deleted yet: {failed.message}"
                fields = {"error": type(failed).__name__, "hint": failed.hint}
                self._observer.on_event(Event("stream.deletion_failed", message, Level.WARNING, name, fields=fields))

    def _finish(self, name: str, options: Json) -> Json:
        stream = self._spec(name)
        if self._running is not None:
            self._running.remove(name)
        done = Deletion(self._home, self._store, stream, **options).run()
        self._tell("stream.deleted", f"stream {name} is deleted", name)
        return done

    # What is there

    def _spec(self, name: str) -> StreamSpec:
        """The stream, with the password that may stand in its URI if this process was given it."""
        given = self._running.spec(name) if self._running is not None else None
        return given if given is not None else from_definition(self._definition(name))

    def _definition(self, name: str) -> Json:
        found = self._store.get_stream(name)
        if found is None:
            raise unknown_stream(name, self._store.list_streams(), self._home)
        return found

    def _targets(self, name: str, target: str | None) -> list[str]:
        known = [one["name"] for one in self._definition(name)["targets"]]
        if name in self._store.deletions():
            raise ConfigError(f"stream {name} is being deleted", hint=f"finish that first: millstream delete {name}")
        if target is None:
            return known
        if target not in known:
            raise unknown_target(f"stream {name}", target, known)
        return [target]

    def _what(self, name: str, target: str | None) -> str:
        return f"stream {name}" if target is None else f"target {target} of stream {name}"

    def _tell(self, kind: str, message: str, stream: str, target: str | None = None) -> None:
        self._observer.on_event(Event(kind, message, stream=stream, target=target))
