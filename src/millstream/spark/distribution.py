"""Spark's files as its processes see them: the installed ones by links, without those that make Python slow.

Spark puts `python/lib/pyspark.zip` of its home in front of everything that a Python process of its imports.
From a zip Python compiles every module anew in every process, and reads the zip's directory again for every
task. The same modules are installed beside us, compiled; so Spark gets a home in which there is no such zip.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pyspark

_LINKED = ("bin", "jars", "sbin")
"""Not `python`, where the zips are, nor `work`, into which the workers of `local-cluster` write."""


def installed() -> Path:
    """The pyspark of this Python."""
    return Path(pyspark.__file__).parent


def shelf() -> Path:
    """Where set-up keeps what is made once for an installation: within the environment of this Python."""
    return Path(sys.prefix) / "share" / "millstream"


def shared_distribution() -> Path:
    """The distribution that all sessions of this Python use if set-up has made it."""
    return shelf() / f"spark-{pyspark.__version__}"


def make_distribution(where: Path) -> Path:
    """Make one, or complete it. Safe for several at a time."""
    where.mkdir(parents=True, exist_ok=True)
    for name in _LINKED:
        link = where / name
        # An older one may lead to an environment that has been moved; somebody else may be faster.
        if link.is_symlink() and not link.exists():
            link.unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):
            link.symlink_to(installed() / name)
    return where


def is_ours(spark_home: str) -> bool:
    """Whether a Spark home runs the jars of this Python's pyspark."""
    jars = Path(spark_home) / "jars"
    return jars.exists() and jars.resolve() == (installed() / "jars").resolve()
