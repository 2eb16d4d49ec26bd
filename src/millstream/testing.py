"""For tests of streams without a database: a source that does what a script says.

    script = Script(tmp_path / "shop")
    script.table("public.orders", {"id": "integer", "note": "text"}, key=["id"])
    stream = StreamSpec("shop", script.source("shop"), Mode.CDC, targets)
    script.insert("public.orders", id=1, note="first")

    await_events(engine, "shop", 1)

Everything behind the source is the real thing: capture process, journal, Spark, targets.
"""

from __future__ import annotations

import threading
import time

from millstream.engine.replicator import Replicator
from millstream.errors import NotReady
from millstream.model import StreamState
from millstream.sources.scripted.script import Script, Transaction

__all__ = ["Script", "Transaction", "await_events"]

LOOK_SECONDS = 0.05


def await_events(engine: Replicator, name: str, count: int, timeout: float = 60.0) -> None:
    """Wait until `count` changes were delivered since the stream exists, all targets together.

    Raises NotReady when time runs out, and at once when the stream has failed.
    """
    deadline, pause = time.monotonic() + timeout, threading.Event()
    while (status := engine.get_status(name)).events_replicated < count:
        so_far = f"stream {name} has delivered {status.events_replicated} of {count} changes"
        if status.state is StreamState.FAILED:
            raise NotReady(f"{so_far} and has failed: {status.last_error}")
        if time.monotonic() >= deadline:
            raise NotReady(f"{so_far} after {timeout:g} s, and is {status.state.value}")
        pause.wait(LOOK_SECONDS)
