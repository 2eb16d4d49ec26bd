"""Named places where a test can kill the process with SIGKILL.

A failpoint stands after each durable step, so that a test can prove that a crash between any two
of them loses and doubles nothing. They cost one dictionary lookup when unused.

    MILLSTREAM_FAILPOINT=journal.synced             kill at the first hit
    MILLSTREAM_FAILPOINT=journal.synced:5           kill at the fifth hit
    MILLSTREAM_FAILPOINT=journal.synced:5,files.staged   several places
    MILLSTREAM_FAILPOINT_STATE=/some/dir            count hits across processes, and kill only once each

Without the state directory each process counts for itself, and a process that is started again
with the same environment is killed again. Names are literals, `failpoint("room.step")`, so that
a test can list all of them from the code.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path


def _parse(armed: str) -> dict[str, int]:
    """Hits left per name; a count that is no number is a mistake in a test and must not pass silently."""
    pairs = (entry.strip().partition(":") for entry in armed.split(",") if entry.strip())
    return {name: int(count or "1") for name, _, count in pairs}


_left = _parse(os.environ.get("MILLSTREAM_FAILPOINT", ""))
_state = os.environ.get("MILLSTREAM_FAILPOINT_STATE")


def failpoint(name: str) -> None:
    """Kill this process here, if `MILLSTREAM_FAILPOINT` names this place and the count is reached."""
    if name in _left:
        _hit(name)


def _hit(name: str) -> None:
    if _state is None:
        _left[name] -= 1
        if _left[name] == 0:
            _die()
        return
    counter = os.open(Path(_state) / f"{name}.hits", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(counter, b".")
    hits = os.fstat(counter).st_size
    os.close(counter)
    if hits >= _left[name]:
        try:
            os.close(os.open(Path(_state) / f"{name}.fired", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        except FileExistsError:
            return
        _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
