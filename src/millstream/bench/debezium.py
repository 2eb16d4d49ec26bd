"""Debezium beside us: its embedded engine, with a sink that only counts, on a copy of the same slot.

`bench/debezium/build` in a clone of the project fetches it with Maven and compiles `Counter.java`. Its clock is that of
all others: it starts when the server takes the connection over which it streams, and ends with the last change.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from millstream.bench.frame import Taken
from millstream.bench.rig import PUBLICATION, Backlog
from millstream.embedded.postgres import HOST, SUPERUSER
from millstream.errors import BenchFailed
from millstream.spark.java import find_java

MUST = 4.0
_CLONE = Path(__file__).parents[3]
_BUILT = _CLONE / ".cache" / "debezium"


def missing() -> str | None:
    """Why Debezium cannot be run here; None if it can."""
    if not (_CLONE / "bench" / "debezium").is_dir():
        return "its program is not part of the package, only of a clone of the project"
    if not (_BUILT / "stamp").is_file():
        return "it is not built; run bench/debezium/build (needs Maven and a Java compiler)"
    return None


def name() -> str:
    """What is run, with its version."""
    (jar,) = (_BUILT / "jars").glob("debezium-embedded-*.jar")
    return f"Debezium {jar.stem.removeprefix('debezium-embedded-')}, embedded, to a sink that counts"


class Debezium:
    """One process for all drains of a bench, so that it is warm after the first."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        classes = f"{_BUILT / 'classes'}:{_BUILT / 'jars' / '*'}"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(find_java().home / "bin" / "java"), "-classpath", classes, "Counter"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process, self._process = self._process, None
        if process is not None:
            if error is not None:
                process.kill()
            process.communicate()

    def drain(self, backlog: Backlog) -> Taken:
        """Read a copy of the slot until every change has reached the sink."""
        with backlog.slot("debezium") as slot:
            order = (HOST, backlog.server.port, "postgres", SUPERUSER, slot, PUBLICATION, backlog.part.changes)
            answer = self._ask("\t".join(map(str, order)))
        if answer[0] == "error" or len(answer) != 5:
            raise BenchFailed(f"Debezium failed: {' '.join(answer[1:]) or 'it ended; see its log'}")
        to_first, to_last, *counts = map(int, answer)
        reference = backlog.reference.operations
        equal = counts == [reference[operation] for operation in "IUD"]
        return Taken(to_last / 1e9, equal, extra={"first_seconds": round(to_first / 1e9, 3)})

    def _ask(self, order: str) -> list[str]:
        process = self._process
        assert process is not None  # noqa: S101 - used as a context manager
        assert process.stdin is not None  # noqa: S101
        assert process.stdout is not None  # noqa: S101
        try:
            process.stdin.write(order + "\n")
            process.stdin.flush()
        except OSError:  # it has ended, which the empty answer says too
            return [""]
        return process.stdout.readline().strip().split("\t")
