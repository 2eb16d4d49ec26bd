"""`millstream run` as a process of its own, as it is in service: so that all of it can be weighed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millstream.bench.processes import Meter, tree_memory
from millstream.bench.rig import SOURCE, await_true
from millstream.demo.engine import Engine
from millstream.engine.home import Home
from millstream.errors import BenchFailed, MillstreamError

STREAM = "bench"
START_SECONDS = 120.0


class Apart:
    """An engine that runs one stream of the bench. The servers are not below it, and not part of its figures."""

    def __init__(self, engine: Engine, home: Home) -> None:
        self._engine = engine
        self._home = home

    @property
    def journal(self) -> Path:
        return self._home.journal_path(SOURCE)

    def meter(self) -> Meter:
        """The processor time of all its processes from now on."""
        return Meter(self._engine.pid)

    def memory(self) -> int:
        """Bytes that all its processes take now; what they share counts once."""
        return tree_memory(self._engine.pid)

    def await_delivered(
        self, seq: int, target: str | None = None, *, targets: int = 1, seconds: float = START_SECONDS
    ) -> None:
        """Wait until the target, or every target (so many at least), has this seq by its saved cursor."""
        what = f"seq {seq} is delivered"
        await_true(lambda: self.has_delivered(seq, target, targets=targets), what, seconds=seconds, every=0.05)

    def has_delivered(self, seq: int, target: str | None = None, *, targets: int = 1) -> bool:
        """Whether it has. Raises BenchFailed if the engine has ended."""
        if not self._engine.running:
            raise BenchFailed(f"the engine ended: {self._last_words()}")
        try:
            store = self._home.open_state(read_only=True)
        except MillstreamError:  # it has not made one yet
            return False
        try:
            cursors = [one for one in store.cursors(STREAM) if target in (None, one.target)]
        finally:
            store.close()
        return len(cursors) >= targets and min(cursor.seq for cursor in cursors) >= seq

    def _last_words(self) -> str:
        return " ".join(self._engine.log.read_text(errors="replace").split()[-60:])


@contextmanager
def apart(file: Path, directory: Path) -> Iterator[Apart]:
    """Start the engine on a stream file; stop it at the end, as a service manager would."""
    home = Home(directory / "home").create()
    engine = Engine(file, home.path, directory / "engine.log")
    # The demo's Java is one for a few seconds; a service's is the default one.
    engine.start(environment={"JDK_JAVA_OPTIONS": ""})
    try:
        yield Apart(engine, home)
        code = engine.stop()
    except BaseException:
        engine.kill()
        raise
    if code != 0:
        raise BenchFailed(f"the engine ended with {code}")
