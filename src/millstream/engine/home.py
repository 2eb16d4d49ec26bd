"""The directory in which Millstream keeps everything that is its own.

HOME/                                0700
  run.lock                           flock of the one process that runs streams here, and who it is
  state.db                           the state store
  journals/<source>/                 one journal per source
  checkpoints/<stream>/<target>/     Spark's checkpoints, one directory per delivery epoch inside
  spark/                             Spark's scratch space
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from millstream.errors import ConfigError, HomeLocked
from millstream.state.sqlite import SqliteStateStore

ENVIRONMENT = "MILLSTREAM_HOME"
DEFAULT = ".millstream"

BRIEF_SECONDS = 15.0
"""How long an owner that said it would be brief is waited for."""

_ANOTHER = f"choose another directory with --home or ${ENVIRONMENT}"

_NAME = re.compile(r"[a-z][a-z0-9_-]*")


@dataclass(frozen=True)
class Owner:
    """The process that holds a home's lock, as it wrote itself down."""

    pid: int
    host: str
    started_at: datetime
    brief: bool = False
    """It only changes something and lets go at once: worth waiting for."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, started {self.started_at:%Y-%m-%d %H:%M:%S} UTC"


class Home:
    """A home directory. Naming one creates nothing; `create` and `lock` do."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()

    @classmethod
    def locate(cls, option: Path | str | None = None) -> Home:
        """The home to use: `option`, else $MILLSTREAM_HOME, else ./.millstream. Raises ConfigError for a file."""
        home = cls(option or os.environ.get(ENVIRONMENT) or DEFAULT)
        if home.path.exists() and not home.path.is_dir():
            raise ConfigError(f"the home {home.path} is no directory", hint=_ANOTHER)
        return home

    @property
    def state_path(self) -> Path:
        return self.path / "state.db"

    @property
    def spark_path(self) -> Path:
        return self.path / "spark"

    @property
    def journals_path(self) -> Path:
        return self.path / "journals"

    @property
    def lock_path(self) -> Path:
        return self.path / "run.lock"

    def journal_path(self, source: str) -> Path:
        return self.journals_path / _checked(source)

    def checkpoint_path(self, stream: str, target: str) -> Path:
        return self.path / "checkpoints" / _checked(stream) / _checked(target)

    def create(self) -> Home:
        """Make the directories that are missing. An existing home is left as it is."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for part in (self.journals_path, self.path / "checkpoints", self.spark_path):
                part.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot create the home {self.path}: {error.strerror}", hint=_ANOTHER) from error
        return self

    def open_state(self, *, read_only: bool = False) -> SqliteStateStore:
        """The home's state store. For reading it must exist already."""
        return SqliteStateStore(self.state_path, read_only=read_only)

    @contextmanager
    def lock(self, *, brief: bool = False) -> Iterator[Owner]:
        """Own this home for as long as the block runs; create it first if it is missing.

        Raises HomeLocked, which names the owner. The lock is the kernel's: it ends with the
        process, however that ends, so a stale one cannot be. `brief` says that the block takes
        seconds at most: who comes meanwhile waits for it, as this waits for another brief owner.
        """
        self.create()
        file = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            owner = self._take(file, brief)
            deadline, pause = time.monotonic() + BRIEF_SECONDS, threading.Event()
            while isinstance(owner, HomeLocked):
                if time.monotonic() >= deadline or not _is_brief(file):
                    raise owner
                pause.wait(0.05)
                owner = self._take(file, brief)
            yield owner
        finally:
            os.close(file)

    def _take(self, file: int, brief: bool) -> Owner | HomeLocked:
        with self._gate():
            if not _try_lock(file, fcntl.LOCK_EX):
                return self._locked(_read_owner(file))
            owner = Owner(os.getpid(), socket.gethostname(), datetime.now(UTC), brief)
            _write_owner(file, owner)
        return owner

    def owner(self) -> Owner | None:
        """Who runs streams on this home at this moment; None when nobody does."""
        if not self.lock_path.exists():
            return None
        with self._gate():
            file = os.open(self.lock_path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return None if _try_lock(file, fcntl.LOCK_SH) else _read_owner(file)
            finally:
                os.close(file)

    @contextmanager
    def _gate(self) -> Iterator[None]:
        # Asking who owns the home takes the lock for an instant. The gate keeps that instant from
        # being seen by a process that starts just then, which would give up for no reason.
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            yield
        finally:
            os.close(directory)

    def _locked(self, owner: Owner) -> HomeLocked:
        return HomeLocked(
            f"the home {self.path} is in use by {owner}", hint=f"stop it (kill {owner.pid}), or use another --home"
        )


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_owner(file: int, owner: Owner) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(asdict(owner), default=datetime.isoformat).encode(), 0)


def _read_owner(file: int) -> Owner:
    # The gate is held, and the owner wrote itself down before it let go of it: the text is whole.
    value = json.loads(os.pread(file, 4096, 0))
    started_at = datetime.fromisoformat(value["started_at"])
    return Owner(value["pid"], value["host"], started_at, value.get("brief", False))


def _is_brief(file: int) -> bool:
    """Whether whoever holds the lock lets go of it at once. Read without the gate: a torn text is a change of owner."""
    try:
        return bool(json.loads(os.pread(file, 4096, 0)).get("brief", False))
    except ValueError:
        return True


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name for a directory of a home", hint="names are [a-z][a-z0-9_-]*")
    return name
