"""Whether the executors of a cluster are fit for delivery: same package, same Python, and they see the journal.

Asked twice. At the start a small job looks at every executor there is, so that a cluster that was
set up wrongly is told before anything is written. Later each Python worker asks itself once, before
its first task: executors come and go. The answer to "no" is never data, always an error that names
the host.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import millstream
from millstream.errors import ExecutorUnfit, JournalError
from millstream.journal import JournalReader

Locations = tuple[str, ...]

_SHARE = "put the home on storage that every worker has at the same path, or run workers on this host only"


@dataclass(frozen=True)
class Needed:
    """What the driver has, and every executor must have too. Small and picklable."""

    version: str
    python: str
    journals: tuple[tuple[Locations, str], ...]
    """Where each journal can be read, and its id."""

    @classmethod
    def here(cls, journals: Mapping[Locations, str]) -> Needed:
        """By the example of this process."""
        return cls(millstream.__version__, _python(), tuple(journals.items()))


@dataclass(frozen=True)
class Executor:
    """One executor that was asked. `lacks` is None when it is fit."""

    host: str
    directory: str
    """Where its processes run: tells two executors of one host apart."""
    lacks: str | None
    fix: str | None


def look_at_executors(spark: SparkSession, needed: Needed) -> list[Executor]:
    """Ask every executor of the session, as far as they have registered. Raises ExecutorUnfit if one is not fit."""
    context = spark.sparkContext
    # More tasks than slots: whichever executor is slow to start its first Python worker still gets some.
    tasks = 1 if is_local(spark) else 2 * max(1, context.defaultParallelism)

    def ask(_: Iterable[int]) -> Iterator[Executor]:
        yield myself(needed)

    try:
        said = context.parallelize(range(tasks), tasks).mapPartitions(ask).collect()
    except PySparkException as failed:
        raise _cannot_even_answer(failed) from failed
    found = sorted(set(said), key=lambda executor: (executor.host, executor.directory))
    _refuse(found)
    return found


_found_fit: set[Needed] = set()


def is_local(spark: SparkSession) -> bool:
    """Whether tasks run in Spark's own Java process on this host."""
    return (spark.sparkContext.master or "").startswith("local[")


def check_myself(needed: Needed) -> None:
    """For a task: raises ExecutorUnfit if this executor is not fit. A worker that was fit once is not asked again."""
    if needed not in _found_fit:
        _refuse([myself(needed)])
        _found_fit.add(needed)


def myself(needed: Needed) -> Executor:
    """This process's word on its executor."""
    lacks = _difference(needed) or next(
        (reason for locations, journal_id in needed.journals if (reason := _unreadable(locations, journal_id))), None
    )
    fix = None
    if lacks is not None:
        fix = _SHARE if "journal" in lacks else "install the driver's environment on every worker, at the same path"
    return Executor(socket.gethostname(), str(Path.cwd()), lacks, fix)


def _difference(needed: Needed) -> str | None:
    if millstream.__version__ != needed.version:
        return f"has millstream {millstream.__version__}, the driver {needed.version}"
    if _python() != needed.python:
        return f"has Python {_python()}, the driver {needed.python}"
    return None


def _unreadable(locations: Locations, journal_id: str) -> str | None:
    try:
        found = JournalReader(locations).header().journal_id
    except (JournalError, OSError):
        return f"cannot read the journal at {', '.join(locations)}"
    return None if found == journal_id else f"has another journal at {', '.join(locations)}"


def _refuse(executors: Sequence[Executor]) -> None:
    unfit = [executor for executor in executors if executor.lacks is not None]
    if unfit:
        names = "; ".join(f"the executor on {one.host} ({one.directory}) {one.lacks}" for one in unfit)
        raise ExecutorUnfit(names, hint=unfit[0].fix)


def _cannot_even_answer(failed: PySparkException) -> ExecutorUnfit:
    """No Python worker of ours could start there: Spark's words say why, and hold no row."""
    text = str(failed)
    if "No module named" in text:
        reason = "an executor has no millstream to import"
    elif "PYTHON_VERSION_MISMATCH" in text:
        reason = "an executor runs another Python than the driver"
    elif "Cannot run program" in text:
        reason = f"an executor has no {os.environ.get('PYSPARK_PYTHON', 'python')} to run"
    else:
        reason = f"the executors could not be asked: Spark reported {type(failed).__name__}"
    return ExecutorUnfit(reason, hint="install the driver's environment on every worker, at the same path")


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])
