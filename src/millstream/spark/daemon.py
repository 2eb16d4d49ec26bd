"""The parent of Spark's Python workers, with what a delivery task needs already imported.

Spark forks a worker from this process for each task it has no idle worker for, and reaps idle
workers after a minute. A fork of a parent that has numpy, pyarrow and the decoders loaded starts in
milliseconds; without it the first batch after a quiet minute would pay half a second of imports.
Spark starts it by name: `spark.python.daemon.module=millstream.spark.daemon`.
"""

from __future__ import annotations

import gc
import importlib
import sys

PRELOAD = (
    "numpy",
    "pandas",
    "pyarrow",
    "pyarrow.compute",
    "pyarrow.parquet",
    "pyspark.worker",
    "millstream.changelog",
    "millstream.journal",
    "millstream.sources.decoders",
    "millstream.spark.format_readers",
    "millstream.spark.slices",
    "millstream.spark.stage",
    "millstream.targets",
    "millstream.targets.files",
)

KEPT_BYTES = 256 << 20
"""What a worker may keep of the memory of its last task; Spark ends workers that are idle for a minute."""


def _forget_jars() -> None:
    """Take Spark's jar off the path: no Python is in it, and every task would read its table of contents anew."""
    for entry in [entry for entry in sys.path if entry.endswith(".jar")]:
        sys.path.remove(entry)
        sys.path_importer_cache.pop(entry, None)


def main() -> None:
    """Import what workers will need, then do what Spark's own daemon does."""
    _forget_jars()
    import pyarrow
    from pyspark import daemon

    from millstream.memory import keep_freed, use_small_pages

    # A fork keeps only the thread that forked: a pool that pyarrow started here would be dead in
    # every worker. None is started as long as nothing is computed before the fork.
    for module in PRELOAD:
        importlib.import_module(module)
    keep_freed(KEPT_BYTES)
    # A worker that is new touches all of its memory for the first time, and Spark ends those that are idle.
    use_small_pages()
    # One task is one core of Spark's; more threads inside it would fight the other tasks.
    pyarrow.set_cpu_count(1)
    # Workers collect garbage after each task: not through all that was imported here, and without
    # copying its pages.
    gc.collect()
    gc.freeze()
    daemon.manager()


if __name__ == "__main__":
    main()
