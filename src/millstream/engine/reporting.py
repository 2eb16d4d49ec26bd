"""What a process writes down of the streams it runs, for everybody who asks how they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from millstream.engine.delivery import DeliveryQuery
from millstream.engine.reports import CaptureReport, TargetReport
from millstream.engine.status import RELOAD
from millstream.errors import MillstreamError
from millstream.model import Mode, StreamSpec, StreamState
from millstream.state.base import Runtime, StateStore


class Reporter:
    """Writes runtime states. From any thread, one at a time."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._reported_at = float("-inf")

    def is_due(self, interval_ms: int) -> bool:
        """Whether the last report is older than that; if so, the next one is counted as made."""
        now = time.monotonic()
        with self._lock:
            if now - self._reported_at < interval_ms / 1000:
                return False
            self._reported_at = now
            return True

    def write(
        self,
        stream: StreamSpec,
        capture: CaptureReport,
        queries: Mapping[str, DeliveryQuery],
        unfit: Mapping[str, MillstreamError],
        everyone: StreamState | None = None,
        held: Mapping[str, str] | None = None,
    ) -> None:
        """A stream and each of its targets. `everyone`: the state of all that has not failed and is not paused.

        `held` are targets that are being compared with their source, and how far that is.
        """
        held = held or {}
        # Looked at once: what the stream is said to be must follow from what is said of its targets.
        unfit, states = dict(unfit), {name: query.state for name, query in queries.items()}
        paused, gone = self._store.paused(stream.name), self._store.needs_reload(stream.name)
        for target in stream.targets:
            stopped = not paused.isdisjoint({"", target.name})
            query = None if stopped else queries.get(target.name)
            said = self._target(stream, target.name, query, states.get(target.name), everyone, stopped)
            if target.name in held and everyone is None:
                report = TargetReport(verifying=held[target.name] or "begins")
                said = Runtime(stream.name, target.name, StreamState.CATCHING_UP, report.to_json())
            if target.name in unfit:
                failed = unfit[target.name]
                report = TargetReport(error=failed.message, hint=failed.hint)
                said = Runtime(stream.name, target.name, StreamState.FAILED, report.to_json())
            elif target.name in gone:
                report = TargetReport(error=gone[target.name], hint=RELOAD)
                said = Runtime(stream.name, target.name, StreamState.NEEDS_RELOAD, report.to_json())
            self._store.set_runtime(said)
        state = StreamState.FAILED if unfit else self._stream_state(stream, capture, states, paused, gone, held)
        if everyone is not None and state not in (StreamState.FAILED, StreamState.PAUSED, StreamState.COMPLETE):
            state = everyone
        self._store.set_runtime(Runtime(stream.name, "", state, capture.to_json()))

    def _target(
        self,
        stream: StreamSpec,
        name: str,
        query: DeliveryQuery | None,
        state: StreamState | None,
        everyone: StreamState | None,
        paused: bool,
    ) -> Runtime:
        """`state` was the query's before anything else was asked of it: why it failed is known by then."""
        if query is None or state is None:
            state = StreamState.PAUSED if paused else everyone or StreamState.CREATED
            return Runtime(stream.name, name, state, TargetReport().to_json())
        said, error = query.status(), query.error
        report = TargetReport(
            events=said["events"],
            bytes=said["bytes"],
            batches=said["batches"],
            retrying=said["retrying"],
            error=error.message if error else None,
            hint=error.hint if error else None,
            startup=said["startup"],
            baseline=said["snapshot"],
        )
        settled = state in (StreamState.FAILED, StreamState.COMPLETE)
        state = state if settled or everyone is None else everyone
        return Runtime(stream.name, name, state, report.to_json())

    def _stream_state(
        self,
        stream: StreamSpec,
        capture: CaptureReport,
        found: Mapping[str, StreamState],
        paused: set[str],
        gone: Mapping[str, str],
        held: Mapping[str, str],
    ) -> StreamState:
        if capture.state == "halted":
            return StreamState.FAILED
        able = [target.name for target in stream.targets if target.name not in gone]
        if not able:
            return StreamState.FAILED
        flowing = [name for name in able if paused.isdisjoint({"", name})]
        if not flowing:
            return StreamState.PAUSED
        states = [found[name] for name in flowing if name in found]
        states += [StreamState.CATCHING_UP for name in flowing if name in held]
        if StreamState.FAILED in states:
            return StreamState.FAILED
        if StreamState.GATED in states:
            return StreamState.GATED
        if not states:
            return StreamState.CREATED
        if StreamState.SNAPSHOT in states:
            return StreamState.SNAPSHOT
        if stream.mode is Mode.SNAPSHOT:
            copied = states == [StreamState.COMPLETE] * len(stream.targets)
            return StreamState.COMPLETE if copied else StreamState.CREATED
        if StreamState.CATCHING_UP in states:
            return StreamState.CATCHING_UP
        end = capture.source.get("seq")
        cursors = [cursor for cursor in self._store.cursors(stream.name) if cursor.target in flowing]
        behind = end is not None and any(cursor.seq < end for cursor in cursors)
        return StreamState.CATCHING_UP if behind or len(states) < len(flowing) else StreamState.RUNNING
