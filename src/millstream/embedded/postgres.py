"""Start, stop, kill and copy a Postgres server that belongs to this process.

The server is a child of a small guard process (see `guard.py`), both in a session of their own:
signals to our terminal do not reach it, and it does not outlive us, even if we are killed.
It listens on the loopback interface only, and trusts whoever connects there: anybody with an
account on this machine is its superuser while it runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self
from urllib.parse import quote

from millstream.embedded.binaries import Account, find_binaries, server_directory, server_environment
from millstream.errors import EmbeddedError

HOST = "127.0.0.1"
START_SECONDS = 60.0
STOP_SECONDS = 60.0
PORT_ATTEMPTS = 5
SUPERUSER = "postgres"

StopMode = Literal["fast", "immediate"]
_STOP_SIGNAL: dict[StopMode, signal.Signals] = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}

DEFAULT_SETTINGS: dict[str, str] = {
    "wal_level": "logical",
    "max_replication_slots": "20",
    "max_wal_senders": "20",
    "listen_addresses": HOST,
    "unix_socket_directories": "",  # a socket's path may have 107 bytes only, and nobody needs one
    "shared_buffers": "64MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
}
_SETTINGS_FILE = "millstream.conf"
_LOG_FILE = "millstream.log"


class EmbeddedPostgres:
    """One server on one data directory.

    `data_dir` None means a temporary one, removed by `close()` (and by the guard, if we die). A
    directory that holds a cluster already is used as it is; an empty or missing one is initialised.
    As root the server runs as `nobody`, who must be able to reach the directory.

    `settings` go on top of `DEFAULT_SETTINGS` into a file that postgresql.conf includes and each
    start rewrites; so ALTER SYSTEM still wins over them.

    The port is chosen at the first start and kept, so that clients find a restarted server where
    it was. Give `port` to take over the address of another server.

    Not safe for use by several threads at once.
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        version: int = 18,
        settings: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        self.version = version
        self.settings = {**DEFAULT_SETTINGS, **(settings or {})}
        self._account = Account.current()
        self._bin = find_binaries(version, self._account)
        self._temporary: Path | None = None
        self._data_dir = data_dir.absolute() if data_dir is not None else None
        self._port = port
        self._guard: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None

    # What it is

    @property
    def data_dir(self) -> Path:
        if self._data_dir is None:
            self._temporary = server_directory()
            self._data_dir = self._temporary / "data"
        return self._data_dir

    @property
    def port(self) -> int:
        if self._port is None:
            raise EmbeddedError("the server has no port before its first start")
        return self._port

    @property
    def pid(self) -> int:
        """The postmaster's process id."""
        if self._pid is None or not self.running:
            raise EmbeddedError("the server does not run")
        return self._pid

    @property
    def running(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    def uri(self, dbname: str = "postgres", user: str = SUPERUSER) -> str:
        return f"postgresql://{quote(user, safe='')}@{HOST}:{self.port}/{quote(dbname, safe='')}"

    def bin(self, name: str) -> Path:
        """A program of this version: psql, pgbench, pg_recvlogical, pg_ctl ..."""
        program = self._bin / name
        if not program.is_file():
            raise EmbeddedError(f"Postgres {self.version} has no program {name} here")
        return program

    def log_tail(self, lines: int = 30) -> str:
        """The end of what the server has written to its log."""
        log = self.data_dir / _LOG_FILE
        if not log.exists():
            return ""
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 65536))
            return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-lines:])

    # Life

    def start(self) -> Self:
        """Start and wait until connections are accepted. Raises EmbeddedError with the log's end."""
        if self.running:
            return self
        self._prepare()
        chosen_before = self._port is not None
        for attempt in range(PORT_ATTEMPTS):
            if not chosen_before:
                self._port = _free_port()
            log_start = self._log_size()
            self._launch()
            if self._await_ready():
                return self
            if "could not bind" not in self._log_from(log_start) or attempt == PORT_ATTEMPTS - 1:
                break
            if chosen_before:
                # Whoever holds our address may be a predecessor on its way out.
                _await_port_free(self.port)
        raise EmbeddedError(f"Postgres {self.version} did not start; its log ends with:\n{self.log_tail()}")

    def stop(self, mode: StopMode = "fast", timeout: float = STOP_SECONDS) -> None:
        """Stop and wait. `fast` ends sessions and writes a checkpoint, `immediate` is a crash.

        A server that has not stopped after `timeout` seconds is killed, and EmbeddedError raised.
        """
        if self._guard is None:
            return
        if self._guard.poll() is None:
            self._signal_group(_STOP_SIGNAL[mode])
            try:
                self._guard.wait(timeout)
            except subprocess.TimeoutExpired:
                tail = self.log_tail()
                self.kill()
                raise EmbeddedError(
                    f"Postgres did not stop within {timeout:g} s and was killed; its log ends with:\n{tail}"
                ) from None
        self._release()

    def restart(self, mode: StopMode = "fast") -> None:
        self.stop(mode)
        self.start()

    def kill(self) -> None:
        """SIGKILL every process of the server at once, as a crash of the machine would."""
        if self._guard is None:
            return
        # The guard stays a moment longer, to reap: where process 1 does not, a dead postmaster would
        # go on as a zombie, and the next one would take it for alive.
        if self._pid is not None and self._guard.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        else:
            self._signal_group(signal.SIGKILL)
        self._guard.wait()
        # Backends lead sessions of their own, so the group signal does not reach them. They notice
        # the death of the postmaster, but a restart would find them still at work.
        while backends := list(_processes_of(self.data_dir)):
            for backend in backends:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(backend, signal.SIGKILL)
            _await_exit(backends)
        self._release()

    def close(self) -> None:
        """Stop, and remove the data directory if it is a temporary one."""
        try:
            self.stop()
        finally:
            if self._temporary is not None:
                shutil.rmtree(self._temporary, ignore_errors=True)
                self._temporary = self._data_dir = None

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Copies

    def basebackup(self, to: Path, *, port: int | None = None) -> EmbeddedPostgres:
        """Copy the running cluster into `to` as a standby of this server; the caller starts it."""
        standby = EmbeddedPostgres(to, self.version, self.settings, port)
        standby._make_data_dir()
        standby._run(
            "pg_basebackup", "--host", HOST, "--port", str(self.port), "--username", SUPERUSER,
            "--pgdata", str(standby.data_dir), "--wal-method", "stream", "--checkpoint", "fast",
            "--write-recovery-conf", "--no-sync",
        )  # fmt: skip
        (standby.data_dir / _LOG_FILE).unlink(missing_ok=True)
        return standby

    def promote(self) -> None:
        """Make a standby a primary of its own, on a new timeline, and wait until it is one."""
        self._run("pg_ctl", "promote", "--pgdata", str(self.data_dir), "--wait", "--timeout", f"{START_SECONDS:.0f}")

    # How

    def _prepare(self) -> None:
        """Make sure that there is a cluster of our version, with our settings."""
        self._make_data_dir()
        version_file = self.data_dir / "PG_VERSION"
        if not version_file.exists():
            self._run(
                "initdb", "--pgdata", str(self.data_dir), "--username", SUPERUSER, "--auth", "trust",
                "--encoding", "UTF8", "--locale", "C", "--no-instructions",
                *(["--no-sync"] if self.settings.get("fsync") == "off" else []),
            )  # fmt: skip
            with (self.data_dir / "postgresql.conf").open("a") as conf:
                conf.write(f"\ninclude_if_exists = '{_SETTINGS_FILE}'\n")
        elif (found := version_file.read_text().strip()) != str(self.version):
            raise EmbeddedError(f"{self.data_dir} belongs to Postgres {found}, not {self.version}")
        lines = [f"{name} = {_quote_setting(value)}\n" for name, value in sorted(self.settings.items())]
        (self.data_dir / _SETTINGS_FILE).write_text("".join(lines))
        self._give(self.data_dir / _SETTINGS_FILE)

    def _make_data_dir(self) -> None:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        if self._account.switched and self.data_dir.stat().st_uid == os.geteuid():
            self._give(self.data_dir)
        if not (self.data_dir / "PG_VERSION").exists():
            self.data_dir.chmod(0o700)
        if not self._account.can_enter(self.data_dir):
            raise EmbeddedError(
                f"Postgres runs as {self._account.name} here, who cannot reach {self.data_dir}",
                hint="choose a directory whose parents others may enter, below /var/tmp for instance",
            )

    def _launch(self) -> None:
        order = {
            "argv": [str(self.bin("postgres")), "-D", str(self.data_dir), "-p", str(self.port)],
            "uid": self._account.uid if self._account.switched else None,
            "gid": self._account.gid,
            "remove": [str(self._temporary)] if self._temporary else [],
        }
        with (self.data_dir / _LOG_FILE).open("ab") as log:
            self._give(self.data_dir / _LOG_FILE)
            guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")), json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",
                env=server_environment(),
                start_new_session=True,
            )
        self._guard = guard
        assert guard.stdout is not None  # noqa: S101
        said = guard.stdout.readline().strip()
        self._pid = int(said) if said else None

    def _await_ready(self) -> bool:
        """True when the server takes connections; False, and nothing left running, if it never did."""
        deadline = time.monotonic() + START_SECONDS
        assert self._guard is not None  # noqa: S101
        while time.monotonic() < deadline:
            if self._said_ready():
                return True
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(0.02)
                self._release()
                return False
        self.kill()
        return False

    def _said_ready(self) -> bool:
        """The postmaster keeps its state in the eighth line of its pid file; pg_ctl reads it too."""
        try:
            lines = (self.data_dir / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        # A killed predecessor leaves its file behind, hence the look at the pid.
        return len(lines) >= 8 and lines[0] == str(self._pid) and lines[7].strip() in ("ready", "standby")

    def _signal_group(self, number: signal.Signals) -> None:
        assert self._guard is not None  # noqa: S101
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._guard.pid, number)

    def _release(self) -> None:
        """Close our ends of the pipes to a guard that has ended."""
        if self._guard is not None:
            self._guard.wait()
            for pipe in (self._guard.stdin, self._guard.stdout):
                if pipe is not None:
                    pipe.close()
        self._guard = self._pid = None

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self.bin(program)), *arguments],
            cwd="/",
            env=server_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=10 * START_SECONDS,
            **self._account.popen_args(),
        )
        if done.returncode != 0:
            raise EmbeddedError(f"{program} failed: {(done.stderr or done.stdout).strip()}")

    def _give(self, path: Path) -> None:
        if self._account.switched:
            os.chown(path, self._account.uid, self._account.gid)

    def _log_size(self) -> int:
        log = self.data_dir / _LOG_FILE
        return log.stat().st_size if log.exists() else 0

    def _log_from(self, offset: int) -> str:
        with (self.data_dir / _LOG_FILE).open("rb") as log:
            log.seek(offset)
            return log.read().decode("utf-8", "replace")


def _quote_setting(value: str) -> str:
    return "'" + str(value).replace("\\", "\\\\").replace("'", "''") + "'"


def _free_port() -> int:
    """A port that is free at this moment. Somebody may take it before the server does."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _await_port_free(port: int, seconds: float = 5.0) -> None:
    """Wait until the port can be bound, or the time is over. Nothing signals that, so it is tried."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return
        time.sleep(0.1)


def _processes_of(data_dir: Path) -> Iterator[int]:
    """Every living server process of this cluster: each has the data directory as its own."""
    proc = Path("/proc")
    here = data_dir.resolve()
    for entry in proc.iterdir() if proc.is_dir() else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "cwd").readlink() == here and (entry / "exe").readlink().name == "postgres":
                    yield int(entry.name)


def _await_exit(pids: list[int]) -> None:
    """Wait for processes that are not our children (ten seconds at most; the caller looks again)."""
    if sys.platform != "linux":
        return
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                select.select([handle], [], [], 10.0)
            finally:
                os.close(handle)
