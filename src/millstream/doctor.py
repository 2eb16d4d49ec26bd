"""What this machine has of what Millstream needs, and what to do about the rest.

Looks only: nothing is created, started for good or downloaded. Every check answers, whatever the
state of the machine; so this module imports nothing that may be missing.
"""

from __future__ import annotations

import enum
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from millstream.errors import MillstreamError
from millstream.model import Json, SourceSpec

OLDEST_PYTHON = (3, 11)
PYSPARK = ((4, 2), (4, 4))
"""The first version that is supported and the first that is not."""
LOW_DISK_BYTES = 4 << 30
FIRST_SOUND_JAVA_17 = (17, 0, 11)


class State(enum.StrEnum):
    """MISSING: a run will fail. WARNING: something will be worse than it could. OK: fine."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"


@dataclass(frozen=True)
class Found:
    """One thing that was looked at. `fix` is a command or one sentence; None when all is well."""

    check: str
    state: State
    found: str
    fix: str | None = None

    def to_json(self) -> Json:
        return {"check": self.check, "state": self.state.value, "found": self.found, "fix": self.fix}


def examine(home: Path) -> list[Found]:
    """Every check, in the order in which a person would fix things."""
    checks: list[Callable[[], Found]] = [
        check_python,
        check_pyspark,
        check_java,
        check_spark_home,
        check_hostname,
        check_arrow,
        lambda: check_home(home),
        lambda: check_disk(home),
        check_psycopg,
        lambda: check_package("delta", "deltalake"),
        lambda: check_package("duckdb", "duckdb"),
        check_embedded,
    ]
    return [*(check() for check in checks), *check_leftovers(home)]


def is_fit(findings: list[Found]) -> bool:
    """Whether nothing is missing that a run needs."""
    return all(finding.state is not State.MISSING for finding in findings)


def check_python() -> Found:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < OLDEST_PYTHON:
        return Found("python", State.MISSING, found, "install Python 3.11 or newer")
    return Found("python", State.OK, found)


def check_pyspark() -> Found:
    version = _version("pyspark")
    fix = "pip install 'pyspark>=4.2,<4.4'"
    if version is None:
        return Found("pyspark", State.MISSING, "not installed", fix)
    if not PYSPARK[0] <= _numbers(version)[:2] < PYSPARK[1]:
        return Found("pyspark", State.MISSING, f"{version}, which is not supported", fix)
    return Found("pyspark", State.OK, version)


def check_java() -> Found:
    from millstream.spark.java import MODULE, find_java

    try:
        java = find_java()
    except MillstreamError as error:
        return Found("java", State.MISSING, error.message, error.hint)
    found = f"{java.version} at {java.home} (by {java.origin}), with {MODULE}"
    if (17,) <= _numbers(java.version) < FIRST_SOUND_JAVA_17:
        return Found("java", State.WARNING, found, "update it: Spark asks for 17.0.11 or newer")
    return Found("java", State.OK, found)


def check_spark_home() -> Found:
    """A Spark of somebody else's is never used; whoever set it should know."""
    foreign = os.environ.get("SPARK_HOME")
    spec = importlib.util.find_spec("pyspark")
    own = Path(spec.origin).parent if spec is not None and spec.origin else None
    if foreign and (own is None or Path(foreign).resolve() != own.resolve()):
        return Found("SPARK_HOME", State.WARNING, f"{foreign}, ignored", "unset SPARK_HOME")
    return Found("SPARK_HOME", State.OK, "not set" if not foreign else "our own pyspark")


def check_hostname() -> Found:
    """Plain Spark does not start on a host that cannot resolve its own name. Ours, on a local master, does."""
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError:
        return Found("hostname", State.WARNING, f"{name} does not resolve", f"add '127.0.1.1 {name}' to /etc/hosts")
    return Found("hostname", State.OK, f"{name} is {address}")


def check_arrow() -> Found:
    versions = {name: _version(name) for name in ("pyarrow", "numpy", "pandas")}
    absent = [name for name, version in versions.items() if version is None]
    if absent:
        return Found("arrow", State.MISSING, f"not installed: {', '.join(absent)}", f"pip install {' '.join(absent)}")
    return Found("arrow", State.OK, ", ".join(f"{name} {version}" for name, version in versions.items()))


def check_home(home: Path) -> Found:
    parent = _nearest_existing(home)
    if not os.access(parent, os.W_OK | os.X_OK) or not parent.is_dir():
        fix = "make it writable, or name another: --home or MILLSTREAM_HOME"
        return Found("home", State.MISSING, f"{home}: {parent} is not writable", fix)
    return Found("home", State.OK, f"{home}{'' if parent == home else ' (not made yet)'}")


def check_disk(home: Path) -> Found:
    free = shutil.disk_usage(_nearest_existing(home)).free
    found = f"{free / (1 << 30):.1f} GiB free at home"
    if free < LOW_DISK_BYTES:
        return Found("disk", State.WARNING, found, "free some: journal and Spark write there")
    return Found("disk", State.OK, found)


def check_psycopg() -> Found:
    fix = "pip install 'millstream[postgres]'"
    version = _version("psycopg")
    if version is None:
        return Found("postgres", State.WARNING, "psycopg is not installed", fix)
    try:
        implementation = importlib.import_module("psycopg.pq").__impl__
    except ImportError as error:
        return Found("postgres", State.WARNING, f"psycopg {version} does not load: {error}", fix)
    if implementation == "python":
        return Found("postgres", State.WARNING, f"psycopg {version} without its C implementation, slow", fix)
    return Found("postgres", State.OK, f"psycopg {version} ({implementation})")


def check_package(kind: str, package: str) -> Found:
    """The package that targets of this kind need."""
    version = _version(package)
    if version is None:
        fix = f"pip install 'millstream[{kind}]', if a target is of this kind"
        return Found(kind, State.WARNING, f"{package} is not installed", fix)
    return Found(kind, State.OK, f"{package} {version}")


def check_embedded() -> Found:
    """The server that the demo and the tests start; nothing else needs it."""
    from millstream.embedded.binaries import FOLDERS, WHEEL, Account, bundled

    account = Account.current()
    try:
        for version in FOLDERS:
            bundled(version)
    except MillstreamError as error:
        return Found("embedded", State.WARNING, error.message, error.hint)
    versions = " and ".join(str(version) for version in sorted(FOLDERS, reverse=True))
    found = f"Postgres {versions} ({WHEEL} {_version(WHEEL)})"
    return Found("embedded", State.OK, f"{found}, run as {account.name}" if account.switched else found)


def check_leftovers(home: Path) -> list[Found]:
    """What is ours on the servers that the home knows, and that no source of this home owns and nobody reads.

    Slots with our prefix, and triggers that were made for one, also if it is gone.
    """
    from millstream.config.definition import from_definition
    from millstream.engine.home import Home

    place = Home(home)
    if not place.state_path.exists() or _version("psycopg") is None:
        return []
    try:
        store = place.open_state(read_only=True)
        streams = [from_definition(store.get_stream(name) or {}) for name in store.list_streams()]
        store.close()
    except MillstreamError as error:
        return [Found("slots", State.WARNING, error.message, error.hint)]
    sources = {stream.source.name: stream.source for stream in streams if stream.source.kind == "postgres"}
    found: dict[str, Found] = {}
    for source in sources.values():
        try:
            left = [*_slots_on(source, list(sources.values())), *_triggers_on(source, list(sources.values()))]
        except MillstreamError as error:
            left = [Found("slots", State.WARNING, f"source {source.name}: {error.message}", error.hint)]
        found |= {one.found: one for one in left}
    return list(found.values())


def _slots_on(source: SourceSpec, sources: list[SourceSpec]) -> list[Found]:
    from millstream.sources.postgres.orphans import orphan_slots

    return [
        Found(
            "slots",
            State.WARNING,
            f"{slot.name} of database {slot.database}: nobody reads it and no source of this home owns it; "
            f"it keeps {slot.retained_bytes >> 20} MiB of log",
            f"if no other home does either: SELECT pg_drop_replication_slot('{slot.name}')",
        )
        for slot in orphan_slots(source, sources)
    ] or [Found("slots", State.OK, f"none without an owner on the server of source {source.name}")]


def _triggers_on(source: SourceSpec, sources: list[SourceSpec]) -> list[Found]:
    from millstream.sources.postgres.orphans import orphan_triggers

    return [
        Found(
            "triggers",
            State.WARNING,
            f"those of slot {one.slot} in database {one.database}: "
            + ("nobody reads it and no source of this home owns it" if one.slot_exists else "the slot is gone")
            + "; they write each DDL command into the log",
            ("if no other home does either: " if one.slot_exists else "") + one.removal,
        )
        for one in orphan_triggers(source, sources)
    ]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """(4, 2, 1) of "4.2.1"; what follows the first part that is no number does not count."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _nearest_existing(path: Path) -> Path:
    """The path itself, or the first directory above it that is there."""
    return next(place for place in (path, *path.parents) if place.exists())
