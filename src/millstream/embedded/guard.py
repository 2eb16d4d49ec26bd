"""The parent of an embedded server: a small process that lives exactly as long as it is needed.

It starts the server, says the server's pid on stdout, and waits for one of two things: the server
ends (then so does the guard, with the same exit code), or its own stdin reaches its end, which
means that the owner is gone, even by SIGKILL. Then it stops the server and removes the
directories that the owner called temporary.

Run as a script by `postgres.py`, isolated, so it imports nothing of this package.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading

STOP_STEPS = ((signal.SIGINT, 10.0), (signal.SIGQUIT, 5.0), (signal.SIGKILL, 5.0))
"""Fast, immediate, the hard way: each with the seconds it gets before the next one."""


def main() -> int:
    order = json.loads(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
        # Signals for the server go to its process group, which is ours too. A handler that does
        # nothing, and not SIG_IGN: the server would inherit the latter.
        signal.signal(number, lambda *_: None)
    server = subprocess.Popen(
        order["argv"],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        stderr=sys.stderr,
        **({"user": order["uid"], "group": order["gid"], "extra_groups": []} if order["uid"] is not None else {}),
    )
    print(server.pid, flush=True)
    ended, orphaned = threading.Event(), threading.Event()

    def stop_when_orphaned() -> None:
        # Not by sys.stdin: a thread that waits in a buffered read makes Python's own exit fail.
        while os.read(0, 4096):
            pass
        orphaned.set()
        for number, seconds in STOP_STEPS:
            server.send_signal(number)
            if ended.wait(seconds):
                return

    threading.Thread(target=stop_when_orphaned, daemon=True).start()
    code = server.wait()
    ended.set()
    if orphaned.is_set():
        for path in order["remove"]:
            shutil.rmtree(path, ignore_errors=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
