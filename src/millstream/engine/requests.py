"""What other processes ask of the one that runs a home, through its state store.

A request is a row: a verb and its arguments. The process that owns the home takes it up within half
a second and writes the answer beside it. Without such a process whoever asks becomes the owner for
a moment and does it himself; also when the owner dies before it has answered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from millstream.config.definition import definition, from_definition, has_secret
from millstream.engine.answers import error_answer, unpacked
from millstream.engine.faults import FaultLog
from millstream.engine.home import Home
from millstream.engine.operations import Operations
from millstream.engine.reload import AskedTables
from millstream.engine.replay import Asked
from millstream.engine.unknown import refuse_unknown_tables, unknown_stream
from millstream.errors import ConfigError, HomeLocked, MillstreamError, RequestFailed
from millstream.failpoint import failpoint
from millstream.model import Json, StreamSpec
from millstream.observe import Observer
from millstream.snapshots.urls import check_address
from millstream.state.base import Request, StateStore

if TYPE_CHECKING:
    # They bring Spark with them, and most commands need none.
    from millstream.engine.snapshotter import Order as SnapshotOrder
    from millstream.engine.snapshotter import Snapshotter
    from millstream.engine.verifier import Order, Verifier

LOOK_SECONDS = 0.4
"""How often the owner looks for requests,"""
ASK_SECONDS = 0.05
"""and who asked for the answer."""
PATIENCE = 180.0
"""Seconds after which no answer is an error: a pause waits for a batch, a deletion for a source."""


def perform(operations: Operations, verb: str, arguments: Mapping[str, Any]) -> Json | Future[Json]:
    """Do what a verb says. Its arguments are JSON. What has to wait is begun: its result comes later."""
    if verb == "upsert":
        operations.upsert([from_definition(stream) for stream in arguments["streams"]])
    elif verb == "pause":
        return operations.pause(arguments["name"], arguments["target"])
    elif verb == "resume":
        operations.resume(arguments["name"], arguments["target"])
    elif verb == "replay":
        return operations.replay(arguments["name"], Asked.from_json(arguments["asked"]), arguments["target"])
    elif verb == "restore":
        return operations.restore(arguments["name"], arguments["target"], arguments["asked"])
    elif verb == "reload":
        return operations.reload(arguments["name"], AskedTables.from_json(arguments["asked"]), arguments["target"])
    elif verb == "retry_letters":
        return operations.retry_letters(arguments["ids"])
    elif verb == "purge_letters":
        return {"purged": operations.purge_letters(arguments["ids"])}
    elif verb == "decide_ddl":
        operations.decide_ddl(arguments["name"], arguments["id"], approved=arguments["approved"])
    elif verb == "delete":
        keep = {"keep_slot": arguments["keep_slot"], "keep_target": arguments["keep_target"]}
        return operations.delete(arguments["name"], **keep)
    else:
        raise ConfigError(
            f"there is no request {verb!r}", hint="both processes must have the same version of millstream"
        )
    return {}


def verify_order(operations: Operations, arguments: Mapping[str, Any], done: Callable[[Json], None]) -> Order:
    """What a request to verify asks for. Raises what is wrong with it."""
    from millstream.engine.verifier import Order
    from millstream.engine.verify import Asked

    name = arguments["name"]
    targets = operations.comparable(name, arguments["target"])
    refuse_unknown_tables(operations.stream(name), arguments["tables"])
    return Order(name, targets, Asked(tuple(arguments["tables"]), bool(arguments["repair"])), done)


def snapshot_order(operations: Operations, arguments: Mapping[str, Any], done: Callable[[Json], None]) -> SnapshotOrder:
    """What a request to take snapshots asks for. Raises what is wrong with it."""
    from millstream.engine.snapshots import kept_targets, place_of
    from millstream.engine.snapshotter import Order

    name, target = arguments["name"], arguments["target"]
    stream = operations.known(name, target)
    names = [one.name for one in stream.targets if target in (None, one.name)]
    targets = kept_targets(stream, names, one=target is not None)
    place_of(stream, arguments["path"])
    return Order(stream, tuple(targets), done, arguments["path"], arguments["format"])


class RequestDesk:
    """The owner's side. The control's thread."""

    def __init__(self, store: StateStore, operations: Operations, verifier: Verifier, snapshotter: Snapshotter) -> None:
        self._store = store
        self._operations = operations
        self._verifier = verifier
        self._snapshotter = snapshotter
        self._taken: set[int] = set()
        """Requests whose answer takes its time, and comes when it is there."""
        self._looked_at = float("-inf")
        self._defect: BaseException | None = None

    def serve(self) -> None:
        """Take up what was asked, if it is time to look."""
        self._verifier.serve()
        self._snapshotter.serve()
        self._operations.serve()
        if self._defect is not None:
            raise self._defect
        if time.monotonic() - self._looked_at < LOOK_SECONDS:
            return
        pending = self._store.pending()
        self._taken &= {request.id for request in pending}
        for request in pending:
            if request.id in self._taken:
                continue
            try:
                refuse_stale(request)
                answer = self._take(request)
            except MillstreamError as failed:
                answer = error_answer(failed)
            if answer is not None:
                self._reply(request.id, answer)
        self._looked_at = time.monotonic()

    def _take(self, request: Request) -> Json | None:
        """The answer; None if it will come by itself."""
        answer = partial(self._store.answer, request.id)
        if request.verb == "verify":
            self._verifier.submit(verify_order(self._operations, request.arguments, answer))
        elif request.verb == "snapshot":
            self._snapshotter.submit(snapshot_order(self._operations, request.arguments, answer))
        else:
            result = perform(self._operations, request.verb, request.arguments)
            if not isinstance(result, Future):
                return {"result": result}
            result.add_done_callback(partial(self._answer, request.id))
        self._taken.add(request.id)
        return None

    def _answer(self, id: int, done: Future[Json]) -> None:
        failed = done.exception()
        if failed is not None and not isinstance(failed, MillstreamError):
            # A defect: it ends the run, as it does where nobody waits.
            self._defect = failed
            return
        self._reply(id, {"result": done.result()} if failed is None else error_answer(failed))

    def _reply(self, id: int, answer: Json) -> None:
        failpoint("engine.request_done")
        self._store.answer(id, answer)


def refuse_stale(request: Request) -> None:
    """Whoever asked this long ago has been told that no answer came, or is gone."""
    if (datetime.now(UTC) - request.submitted_at).total_seconds() > PATIENCE:
        raise RequestFailed(f"the request to {request.verb} was made too long ago", hint="ask again")


def ask(home: Home, verb: str, arguments: Json, observer: Observer, patience: float = PATIENCE) -> Json:
    """Have the home's owner do it, or do it here if it has none. Raises what it raised."""
    if "name" in arguments and not home.path.exists():
        # A home that was mistyped is not made for the sake of saying that it has no such stream.
        raise unknown_stream(arguments["name"], [], home)
    deadline = time.monotonic() + patience
    while True:
        try:
            with home.lock(brief=True):
                return _act(home, verb, arguments, observer)
        except HomeLocked as locked:
            answer = request(home, verb, arguments, deadline, locked)
        if answer is not None:
            return unpacked(answer)


def _act(home: Home, verb: str, arguments: Json, observer: Observer) -> Json:
    store = home.open_state()
    try:
        operations = Operations(home, store, FaultLog(store, observer))
        if verb != "delete":
            operations.finish_deletions()
        result = perform(operations, verb, arguments)
        # Nothing runs here, so that nothing was waited for.
        return result.result() if isinstance(result, Future) else result
    finally:
        store.close()


def request(
    home: Home,
    verb: str,
    arguments: Json,
    deadline: float,
    owner: HomeLocked,
    on_wait: Callable[[StateStore], None] = lambda store: None,
) -> Mapping[str, Any] | None:
    """Leave the request and wait for its answer. None if the owner is gone and somebody has to do it."""
    store = home.open_state()
    pause = threading.Event()
    id = store.submit(verb, arguments)
    try:
        while True:
            found = store.get_request(id)
            if found is not None and found.answer is not None:
                return found.answer
            if home.owner() is None and store.withdraw(id):
                return None
            if time.monotonic() >= deadline and store.withdraw(id):
                raise RequestFailed(
                    f"no answer came: {owner.message}", hint="it may be busy; look at `millstream status`"
                )
            on_wait(store)
            pause.wait(ASK_SECONDS)
    except KeyboardInterrupt:
        store.withdraw(id)
        raise
    finally:
        store.close()


def as_arguments(streams: Sequence[StreamSpec]) -> Json:
    """Streams for a request. Raises ConfigError for one with a password or key in it: that is never written down."""
    for stream in streams:
        check_address(stream.snapshots.path if stream.snapshots else None)
        whose = has_secret(stream)
        if whose is not None:
            raise ConfigError(
                f"stream {stream.name}: a password stands in the URI of {whose}, and is never written down",
                hint="take it out and name where it is: auth_ref: env:NAME or file:PATH",
            )
    return {"streams": [definition(stream) for stream in streams]}
