"""Where the changes of a transaction wait on disk until its commit arrives.

Only a transaction too large for memory comes here. The file has no name (or loses it at once), is
readable by its owner alone, and holds nothing that matters after a crash: the journal's end says
where to read again, and the server sends the transaction once more.
"""

from __future__ import annotations

import contextlib
import errno
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pyarrow as pa

from millstream.errors import JournalFull
from millstream.failpoint import failpoint
from millstream.sources.base import CAPTURED


class Spool:
    """Record batches of one transaction, in order. Not for threads."""

    def __init__(self, directory: Path | None, schema: pa.Schema = CAPTURED, *, clear: bool = True) -> None:
        """Use `directory`, made if missing; whatever a killed process left in it is removed.

        None stands for the system's directory for temporary files.
        """
        self._directory = directory
        self._schema = schema
        if directory is not None and clear:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in directory.iterdir():
                left.unlink()
        self._file: IO[bytes] | None = None
        self._writer: pa.ipc.RecordBatchStreamWriter | None = None
        self.batches = 0

    def another(self, schema: pa.Schema) -> Spool:
        """An empty one beside it, for batches of this schema."""
        return Spool(self._directory, schema, clear=False)

    def write(self, batch: pa.RecordBatch) -> None:
        """Append one batch. Raises JournalFull when the disk has no room."""
        try:
            if self._writer is None:
                self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115 - closed by clear()
                self._writer = pa.ipc.new_stream(pa.PythonFile(self._file, mode="w"), self._schema)
            self._writer.write_batch(batch)
        except OSError as failed:
            raise _full_or(failed) from failed
        self.batches += 1
        failpoint("capture.spooled")

    def drain(self) -> Iterator[pa.RecordBatch]:
        """Every batch in order, one in memory at a time; the spool is empty afterwards."""
        if self._writer is None or self._file is None:
            return
        try:
            self._writer.close()
            self._file.flush()
            self._file.seek(0)
        except OSError as failed:
            raise _full_or(failed) from failed
        with pa.ipc.open_stream(pa.PythonFile(self._file, mode="r")) as reader:
            yield from reader
        self.clear()

    def clear(self) -> None:
        """Forget everything. Idempotent."""
        file, self._file, self._writer, self.batches = self._file, None, None, 0
        if file is not None:
            with contextlib.suppress(OSError):  # a full disk refuses the last buffered bytes, and nobody wants them
                file.close()


def _full_or(failed: OSError) -> Exception:
    if failed.errno in (errno.ENOSPC, errno.EDQUOT):
        return JournalFull("no room on the journal's disk for the changes of a large transaction")
    return failed
