"""Target `files`: every change, in order, as files of a directory per table.

    PATH/
      schema.table/EPOCH-FIRST-LAST-RELATION.parquet   names sort in seq order; a file appears whole
      _millstream/
        owner.json               whose directory this is, and which run may write
        lock                     held while the owner changes and while a batch is published
        commits/END.json         one per batch, written last: a batch counts when this is there
        commits/SEQ-reload-MARK.json  one per table that was copied anew, at this seq: its files are named with MARK
        staging/RUN/             what tasks write; nobody reads it
        rewound/END.json         commits that were taken back, until their batches are delivered again

Delivery *staged*. A batch's files are renamed into place, then its commit file is written: a reader
that wants whole batches reads what commits list; one that reads a table's directory sees a batch a
few milliseconds earlier and, after a crash, what the next `recover` takes away again.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field

from millstream.errors import OutOfRange, TargetRefused, TargetUnavailable
from millstream.failpoint import failpoint
from millstream.model import Json, Relation, SeqRange
from millstream.targets.base import (
    ASKING,
    Attempt,
    Capabilities,
    Delivery,
    Receipt,
    ReloadStep,
    TargetContext,
    TargetCursor,
)
from millstream.targets.changelogs import ChangelogReader
from millstream.targets.directory import (
    OWN,
    OwnDirectory,
    as_target_errors,
    directory_of,
    make_directory,
    read_json,
    sync_directory,
)
from millstream.targets.rebatching import batches_within, listed_files, replace_files

GROUP_ROWS = 131_072
GROUP_BYTES = 32 << 20
"""A row group is written when either is reached: the most a task holds of a file."""

WRITTEN_ROWS = 16_384
"""So many values of a column are written at a time. A row of ours has many columns, and each has its price for it."""

_NAME = re.compile(r"(\d{6})-(\d{20})-(\d{20})-(\d{6,})(-x\d+)?(-r\d+)?\.parquet")
_RELOAD = "-reload-"


class FilesOptions(BaseModel):
    """Options of a target of kind `files`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path = Field(description="The directory to write to. One stream and target per directory.")
    format: Literal["parquet"] = Field("parquet", description="The format of the files.")
    compression: Literal["snappy", "zstd", "none"] = Field("snappy", description="How columns are compressed.")


class FilesTarget:
    """The driver side. See `targets.base.Target` for the contract."""

    kind = "files"
    capabilities = Capabilities(delivery=Delivery.STAGED, keeps_cursor=True, parallel=True)

    def __init__(self, options: FilesOptions) -> None:
        self._options = options
        self._root = options.path.absolute()
        self._own = self._root / OWN
        self._directory = OwnDirectory(self._root)
        self._context: TargetContext | None = None
        self._cursor: TargetCursor | None = None
        self._unsettled: list[Path] = []
        self._replayed: frozenset[int] | None = None
        """The relations that the replay at hand brings; None: all of them."""

    def open(self, context: TargetContext) -> None:
        with as_target_errors(self._root):
            make_directory(self._own / "staging")
            self._cursor = self._directory.open(context)
        self._context = context

    def cursor(self) -> TargetCursor | None:
        return self._cursor

    def recover(self, cursor: TargetCursor | None) -> None:
        """Remove other runs' staging, and files of batches whose commit was never written."""
        context = self._opened()
        with as_target_errors(self._root), self._directory.locked():
            self._directory.check_owner(context)
            for entry in list(os.scandir(self._own / "staging")):
                if not entry.name.startswith(context.run_id):
                    shutil.rmtree(entry.path)
            for leftover in list((self._own / "commits").glob("*.tmp")):
                leftover.unlink()
            for orphan in self._uncommitted(cursor.seq if cursor else None):
                orphan.unlink()
            for orphan in self._unlisted():
                orphan.unlink()
            shutil.rmtree(self._own / "rewound", ignore_errors=True)
        failpoint("files.recovered")

    def stager(self) -> FilesStager:
        return FilesStager(str(self._staging()), self._opened().epoch, self._options.compression)

    @property
    def mirrors(self) -> bool:
        return False

    @property
    def reloads_by_steps(self) -> bool:
        return False

    def remembering(self, renewed: frozenset[str] | None) -> FilesStager:
        return self.stager()

    def reloader(self, step: ReloadStep) -> FilesStager:
        return replace(self.stager(), staging=str(self._staging(step.mark)), mark=step.mark)

    def publish_reload(self, step: ReloadStep, receipts: Sequence[Receipt]) -> None:
        """The files of a table's copy count when the commit that lists them is there."""
        context = self._opened()
        with as_target_errors(self._root), self._directory.locked():
            self._directory.check_owner(context)
            name = f"{step.seq:020d}{_RELOAD}{step.mark}"
            if (self._own / "commits" / f"{name}.json").exists():
                return
            self._put_in_place(receipts, step.mark)
            failpoint("reload.files_renamed")
            listed = _listed(receipts)
            self._directory.write_commit(context, SeqRange(step.seq, step.seq), step.position, listed, name)
            failpoint("reload.files_committed")
            self._unsettled = []
            shutil.rmtree(self._staging(step.mark), ignore_errors=True)

    def settle_reload(self) -> None:
        """Nothing is remembered: rows of a changelog are told by their versions."""

    def batches(self, stream: str, target: str, span: SeqRange) -> list[SeqRange]:
        with as_target_errors(self._root):
            if not (self._own / "commits").is_dir():
                return []
            with self._directory.locked():
                self._directory.check_ours(TargetContext(stream, target, "", "", ASKING, ""))
                return batches_within(self._directory, span)

    def replayer(self, mark: int, *, only: frozenset[int] | None, current: frozenset[int]) -> FilesStager:
        self._replayed = only
        return replace(self.stager(), staging=str(self._staging(mark)), epoch=mark)

    def publish_replay(self, mark: int, range: SeqRange, receipts: Sequence[Receipt]) -> None:
        """The batch counts with its new files from when its commit lists them."""
        context, only = self._opened(), self._replayed
        mine = [receipt for receipt in receipts if only is None or receipt.relation in only]
        with as_target_errors(self._root), self._directory.locked():
            self._directory.check_owner(context)
            self._put_in_place(mine, mark)
            failpoint("replay.files_renamed")
            old = replace_files(self._directory, range, mark, _listed(mine), only)
            failpoint("replay.files_committed")
            self._unsettled = []
            for path in old:
                path.unlink(missing_ok=True)
            shutil.rmtree(self._staging(mark), ignore_errors=True)

    def settle_replay(self) -> None:
        """Remove what one that was killed has left: files which no commit lists, yet or any more."""
        context = self._opened()
        with as_target_errors(self._root), self._directory.locked():
            self._directory.check_owner(context)
            counts = listed_files(self._directory)
            for path, _ in self._named():
                if path not in counts:
                    path.unlink()

    def reader(self) -> ChangelogReader:
        return ChangelogReader(FileChanges(str(self._root)))

    def publish(self, range: SeqRange, end_position: int, receipts: Sequence[Receipt]) -> None:
        context = self._opened()
        with as_target_errors(self._root), self._directory.locked():
            self._directory.check_owner(context)
            if self._cursor is not None and range.end <= self._cursor.seq:
                return
            self._directory.check_follows(context, self._cursor, range)
            self._remove_unsettled()
            self._put_in_place(receipts)
            failpoint("files.renamed")
            self._directory.write_commit(context, range, end_position, _listed(receipts))
            self._unsettled = []
            self._cursor = TargetCursor(context.journal_id, context.epoch, range.end, end_position)
            failpoint("files.commit_written")
            shutil.rmtree(self._staging(), ignore_errors=True)

    def release(self, stream: str, target: str) -> None:
        """Leave the files and what lists them; no stream writes into this directory any more.

        One into which nothing was published is left to whoever comes next.
        """
        with as_target_errors(self._root):
            if not self._directory.release(stream, target):
                return
            with self._directory.locked():
                shutil.rmtree(self._own / "staging", ignore_errors=True)
                cursor = self._directory.cursor()
                for orphan in self._uncommitted(cursor.seq if cursor else None):
                    orphan.unlink()
                if cursor is None:
                    (self._own / "owner.json").unlink(missing_ok=True)

    def rewind(self, stream: str, target: str, seq: int, *, look_only: bool = False) -> TargetCursor | None:
        """Batches count by their commit files: those are put aside, and `recover` removes the rest."""
        with as_target_errors(self._root):
            commits, aside = self._own / "commits", self._own / "rewound"
            if not commits.is_dir():
                return None
            with self._directory.locked():
                self._directory.check_ours(TargetContext(stream, target, "", "", ASKING, ""))
                ends = sorted(
                    (entry.name for entry in os.scandir(commits) if entry.name.endswith(".json")), reverse=True
                )
                after = [name for name in ends if int(name[:20]) > seq]
                _refuse_copies(self._root, seq, after)
                if not look_only:
                    make_directory(aside)
                    for name in after:
                        (commits / name).replace(aside / name)
                        sync_directory(commits)
                        failpoint("files.rewound")
                left = [name for name in ends if name not in after]
                if not left:
                    return None
                commit = read_json(commits / left[0])
                return TargetCursor(commit["journal_id"], commit["epoch"], commit["end"], commit["position"])

    def close(self) -> None:
        self._context = None

    def _staging(self, mark: int | None = None) -> Path:
        """Where tasks write: a copy's beside the batches'."""
        name = self._opened().run_id
        return self._own / "staging" / (name if mark is None else f"{name}-{mark}")

    def _opened(self) -> TargetContext:
        if self._context is None:
            raise TargetRefused(f"{self._root} is not open")
        return self._context

    def _put_in_place(self, receipts: Sequence[Receipt], mark: int | None = None) -> None:
        staging = self._staging(mark)
        directories = {self._root / receipt.detail["directory"] for receipt in receipts}
        for directory in sorted(directories):
            make_directory(directory)
        for receipt in receipts:
            final = self._root / receipt.detail["directory"] / receipt.detail["name"]
            self._unsettled.append(final)
            (staging / receipt.detail["staged"]).replace(final)
        for directory in sorted(directories):
            sync_directory(directory)

    def _remove_unsettled(self) -> None:
        """What an earlier try of this batch put in place: the next try may cut its files differently."""
        for path in self._unsettled:
            path.unlink(missing_ok=True)
        self._unsettled = []

    def _uncommitted(self, seq: int | None) -> Iterator[Path]:
        return (path for path, match in self._named() if seq is None or int(match[3]) > seq)

    def _unlisted(self) -> Iterator[Path]:
        """Files of copies that were never committed: their seq is one that the directory has."""
        marks = {entry.name.rpartition(_RELOAD)[2] for entry in os.scandir(self._own / "commits")}
        return (path for path, match in self._named() if match[5] and f"{match[5][2:]}.json" not in marks)

    def _named(self) -> Iterator[tuple[Path, re.Match[str]]]:
        """The files that have names of ours."""
        for table in os.scandir(self._root):
            if table.name != OWN and table.is_dir():
                for entry in list(os.scandir(table.path)):
                    match = _NAME.fullmatch(entry.name)
                    if match:
                        yield Path(entry.path), match


@dataclass(frozen=True)
class FileChanges:
    """The changes that a directory has of a table, file by file, as far as commits list them."""

    root: str

    def read(self, relation: Relation) -> Iterator[pa.Table] | None:
        """None when no batch has brought anything of the table."""
        listed = self._listed(f"{directory_of(relation)}/")
        return (pq.read_table(Path(self.root) / path, partitioning=None) for path in listed) if listed else None

    def _listed(self, front: str) -> list[str]:
        commits = Path(self.root) / OWN / "commits"
        names = sorted(entry.name for entry in os.scandir(commits) if entry.name.endswith(".json"))
        return [
            file["path"]
            for name in names
            for file in read_json(commits / name)["files"]
            if file["path"].startswith(front)
        ]


def _refuse_copies(root: Path, seq: int, names: Sequence[str]) -> None:
    """Raise OutOfRange where going back would take back the copy of a table, which no journal has."""
    copies = [int(name[:20]) for name in names if _RELOAD in name]
    if copies:
        raise OutOfRange(
            f"{root} got a table anew at seq {max(copies)}, which cannot be taken back to seq {seq}",
            hint=f"replay from seq {max(copies) + 1} on",
        )


def _listed(receipts: Sequence[Receipt]) -> list[Json]:
    """The files of a batch as its commit lists them."""
    return [
        {
            "path": f"{receipt.detail['directory']}/{receipt.detail['name']}",
            "table": receipt.table,
            "relation": receipt.relation,
            "rows": receipt.rows,
            "bytes": receipt.bytes,
            "first_seq": receipt.first_seq,
            "last_seq": receipt.last_seq,
        }
        for receipt in sorted(receipts, key=lambda r: (r.table, r.first_seq))
    ]


@dataclass(frozen=True)
class FilesStager:
    """The executor side: writes one file per relation and task, under a name that no other try has."""

    staging: str
    epoch: int
    compression: str
    mark: int | None = None
    """Of a table's copy; None: what is staged are changes, or a baseline."""

    def stage(
        self, relation: Relation, relation_id: int, batches: Iterator[pa.RecordBatch], attempt: Attempt
    ) -> Sequence[Receipt]:
        staged = f"{attempt.task_attempt}-{attempt.partition}-{relation_id}.parquet"
        path = Path(self.staging) / staged
        first = next(batches, None)
        if first is None:
            return []
        with as_target_errors(path):
            self._make_staging()
            written = self._write(path, first, batches)
        failpoint("files.staged")
        part = f"-r{attempt.partition}" if attempt.baseline else ""
        part = f"-x{self.mark}{part}" if self.mark is not None else part
        name = f"{self.epoch:06d}-{written.first_seq:020d}-{written.last_seq:020d}-{relation_id:06d}{part}.parquet"
        detail = {"staged": staged, "directory": directory_of(relation), "name": name}
        return [
            Receipt(
                relation_id, relation.table, written.rows, written.bytes, written.first_seq, written.last_seq, detail
            )
        ]

    def _make_staging(self) -> None:
        """The directory above was made by the driver: where it is missing, nobody would find what is staged."""
        staging = Path(self.staging)
        try:
            staging.mkdir(exist_ok=True)
        except FileNotFoundError:
            raise TargetUnavailable(
                f"the executor on {socket.gethostname()} does not see {staging.parent}, which the driver has made",
                hint="a path of files must be on storage that the driver and every worker share",
            ) from None

    def _write(self, path: Path, first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> _Written:
        rows = 0
        last = first
        compression = None if self.compression == "none" else self.compression
        with path.open("wb") as file:
            # A dictionary of values that hardly repeat takes a third of the time, and the file gets larger by it.
            with pq.ParquetWriter(
                file, first.schema, compression=compression, use_dictionary=False, write_batch_size=WRITTEN_ROWS
            ) as writer:
                for group in _groups(first, rest):
                    writer.write_table(group)
                    rows += group.num_rows
                    last = group
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        return _Written(rows, size, first.column("_ms_seq")[0].as_py(), last.column("_ms_seq")[-1].as_py())


@dataclass(frozen=True)
class _Written:
    rows: int
    bytes: int
    first_seq: int
    last_seq: int


def _groups(first: pa.RecordBatch, rest: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    waiting, rows, size = [first], first.num_rows, first.nbytes
    for batch in rest:
        if rows + batch.num_rows > GROUP_ROWS or size + batch.nbytes > GROUP_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting, rows, size = [], 0, 0
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
    yield pa.Table.from_batches(waiting)
