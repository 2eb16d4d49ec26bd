"""The one writer of a journal."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from millstream.errors import JournalError
from millstream.failpoint import failpoint
from millstream.journal.closed import ClosedSegments
from millstream.journal.files import HEADER, SEGMENTS, disk_errors, make_directory, replace_file
from millstream.journal.format import SEGMENT_BYTES, Head, Header
from millstream.journal.head import HeadFile, journal_exists, read_head, read_header
from millstream.journal.index import CUTS, INDEX
from millstream.journal.lock import WriterLock, next_epoch
from millstream.journal.looks import CatalogChange, LookFile
from millstream.journal.manifest import Entry
from millstream.journal.pending import FLUSH_BYTES, Pending
from millstream.journal.pruned import Pruned
from millstream.journal.reader import JournalReader
from millstream.journal.recovery import recover
from millstream.journal.relations import RelationLog
from millstream.journal.retention import PruneRequest, at_most, due, size_of
from millstream.journal.schemas import DEFAULT_TENANT, SchemaLog
from millstream.journal.sealing import Sealer
from millstream.journal.segment import segment_name
from millstream.journal.tail import Tail
from millstream.model import Json, Relation, Retention
from millstream.sources.base import Block, Look


class JournalWriter:
    """Appends what capture hands over and makes it durable. One instance, one thread, one process.

    Nothing is visible or promised before `commit` has returned. After JournalFull from `append` or
    `commit` everything appended since the last commit is gone, on disk and in memory: the caller connects again from
    `end`, on the same writer, when there may be room. After any other error the writer is closed
    and a new one opened.
    """

    head: Head
    """As it was last published."""

    def __init__(
        self, path: Path, lock: WriterLock, header: Header, *, segment_bytes: int, flush_bytes: int, tenant: str
    ) -> None:
        """Use `create` or `open`."""
        self.path = path
        self.header = header
        self._lock = lock
        old = read_head(path)
        self._epoch = next_epoch(path)
        # Whoever could not open a journal tries again, and shall not run out of files by it.
        with ExitStack() as opened:
            self._relations = RelationLog(path, old.relations_bytes if _same(old, header) and old else 0)
            opened.callback(self._relations.close)
            state = recover(path, header, old, self._epoch)
            self._pending = Pending(state.end)
            self._tail = Tail(
                path / SEGMENTS,
                header.journal_id,
                self._epoch,
                mark=state.mark,
                end=state.end,
                segment_bytes=segment_bytes,
            )
            opened.callback(self._tail.close)
            self._flush_bytes = flush_bytes
            sealer = Sealer(path / SEGMENTS, header.journal_id, self._epoch, segment_bytes)
            self._closed = ClosedSegments(path, state.manifest, state.superseded, sealer)
            opened.callback(self._closed.close)
            self._head_file = HeadFile(path)
            opened.callback(self._head_file.close)
            self._publish()
            tables, reader = [one.table for one in self._relations.described], JournalReader([str(path)])
            self._schemas = SchemaLog(path, tables, state.end.seq, tenant, reader.schemas_of_rows)
            opened.callback(self._schemas.close)
            self._looks = LookFile(path, state.end.covered)
            opened.pop_all()

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        source: str,
        source_kind: str,
        identity: Mapping[str, Any],
        start_position: int,
        first_seq: int = 1,
        incarnation: int = 1,
        segment_bytes: int = SEGMENT_BYTES,
        flush_bytes: int = FLUSH_BYTES,
        tenant: str = DEFAULT_TENANT,
    ) -> JournalWriter:
        """Make a journal in an empty or missing directory and open it.

        A re-based journal gets a higher `incarnation` and a `first_seq` above every seq that any
        cursor or target of this source knows.
        """
        with disk_errors(path, "create the journal"):
            make_directory(path)
            strangers = {entry.name for entry in path.iterdir()} - {"writer.lock", "epoch", SEGMENTS, HEADER + ".tmp"}
        if strangers:
            raise JournalError(
                f"cannot create a journal in {path}: it holds {', '.join(sorted(strangers)[:3])}",
                hint="choose an empty directory, or open the journal that is there",
            )
        lock = WriterLock(path)
        try:
            header = Header(
                journal_id=str(uuid.uuid4()),
                incarnation=incarnation,
                first_seq=first_seq,
                start_position=start_position,
                source=source,
                source_kind=source_kind,
                identity=dict(identity),
                created_at=datetime.now(UTC).isoformat(),
            )
            with disk_errors(path, "create the journal"):
                make_directory(path / SEGMENTS)
                replace_file(path / HEADER, header.to_bytes())
            failpoint("journal.created")
            return cls(path, lock, header, segment_bytes=segment_bytes, flush_bytes=flush_bytes, tenant=tenant)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        flush_bytes: int = FLUSH_BYTES,
        tenant: str = DEFAULT_TENANT,
    ) -> JournalWriter:
        """Lock the journal, count a new epoch, recover, publish the head.

        Raises JournalLocked (naming the owner), JournalCorrupt, JournalFull, or JournalError when
        there is no journal or the directory cannot be written.
        """
        if not journal_exists(path):
            raise JournalError(f"there is no journal in {path}", hint="create it first")
        lock = WriterLock(path)
        try:
            header = read_header(path)
            return cls(path, lock, header, segment_bytes=segment_bytes, flush_bytes=flush_bytes, tenant=tenant)
        except BaseException:
            lock.release()
            raise

    @property
    def end(self) -> int:
        """J: capture starts from here, and nothing beyond it may ever be acknowledged."""
        return self._tail.end.covered

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def pending(self) -> bool:
        """Whether there is anything that is appended and not committed: rows, or progress alone."""
        return self._pending.since is not None

    @property
    def pending_since(self) -> float | None:
        """`time.monotonic()` of the first append since the last commit."""
        return self._pending.since

    @property
    def pending_bytes(self) -> int:
        """Bytes of appended rows that are not committed; 0 while only progress is pending."""
        return self._pending.bytes

    @property
    def described(self) -> list[Relation]:
        """Every description that was registered, in the order of their ids."""
        return self._relations.described

    def bind(self, identity: Mapping[str, Any]) -> None:
        """Bind the journal to a source that took the place of the one before; durable when it returns.

        Nothing else of the header ever changes.
        """
        if self.header.identity == identity:
            return
        header = replace(self.header, identity=dict(identity))
        with disk_errors(self.path / HEADER, "replace the header"):
            replace_file(self.path / HEADER, header.to_bytes())
        self.header = header
        failpoint("journal.bound")

    def register(self, relation: Relation) -> int:
        """The id of a description, from 1; the same content always gets the same id.

        Durable before any row that refers to it.
        """
        number = self._relations.register(relation)
        self._schemas.add(number, relation.table)
        return number

    def append(self, block: Block) -> None:
        """Take over a block. Rows get their seqs; beyond `flush_bytes` they are written, not committed.

        Raises JournalError for rows that do not follow what is there: positions that go back, a
        relation that was never registered.
        """
        first_seq = self._pending.end.seq + 1
        self._pending.add(block, self._relations.count)
        self._schemas.note(block.rows, first_seq)
        self._looks.hear(block.told, block.rows, first_seq)
        failpoint("journal.appended")
        if self._pending.full(self._flush_bytes):
            try:
                self._write_rows()
                self._tail.flush()
            except JournalError:
                self._go_back()
                raise
            failpoint("journal.flushed")

    def commit(self) -> Head | None:
        """Make everything appended durable and visible, with one fsync.

        None if there is nothing to commit or a transaction is still open. The caller decides how
        often; progress alone is worth a commit now and then, not every time.
        """
        if not self.pending or self._pending.open_transaction:
            return None
        try:
            self._relations.sync()
            self._schemas.sync()
            self._looks.sync()
            self._write_rows()
            closed = self._tail.commit(self._pending.end)
            if closed:
                self._closed.add(*closed)
                self._closed.submit(*closed)
        except JournalError:
            self._go_back()
            raise
        self._tail.accept()
        self._pending.clear()
        self._publish()
        failpoint("journal.head_published")
        return self.head

    def nothing_left(self) -> None:
        """Nothing is being read of the source's log any more: let those know at once who wait for it."""
        self._pending.left = 0
        if self.head.left:
            self._publish()

    @property
    def look(self) -> Json | None:
        """The last look at the source's catalog as noted (`state`, `position`, `at`), and what was `told` after."""
        return self._looks.look

    @property
    def heard(self) -> Sequence[CatalogChange]:
        """What the source's log told of its tables with the last commit."""
        return self._looks.heard

    def note_look(self, look: Look) -> Sequence[CatalogChange]:
        """Make a look at the source's catalog durable; returns what it found. Nothing may be pending."""
        if self._pending.bytes:
            raise JournalError("a look at the catalog comes when everything before it is committed")
        return self._looks.note(look, self.head.seq)

    def _write_rows(self) -> None:
        """Write pending rows as record batches, rolling where a segment is full."""
        for batch, open_end in self._pending.take():
            if self._tail.full:
                self._roll()
            self._tail.write(batch, open_end)

    def _roll(self) -> None:
        """Close the full segment; the next write opens a new one.

        Never more than two segments are in open form: the one that is closed here and the next. If
        sealing has not kept up with writing, the roll waits for it.
        """
        while self._closed.backlog:
            self._closed.seal_next()
            self._closed.collect(wait=True)
        if not self._tail.at_commit:
            self._tail.roll_inside()
            failpoint("journal.rolled_inside")
            return
        entry = self._tail.close_segment()
        self._closed.add(entry)
        self._tail.next_segment()
        failpoint("journal.rolled")
        self._closed.submit(entry)
        self._closed.seal_next()

    def maintain(self) -> None:
        """Start and collect background sealing. Cheap; call it on every turn of the loop.

        Raises what a sealing raised: JournalFull (the same segment is tried again on the next
        call) or JournalCorrupt. Unlike `append` and `commit` it leaves what is pending as it is:
        commit it before connecting again from `end`.
        """
        if self._closed.collect():
            self._publish()
        if self._tail.full and self._tail.at_commit and not self.pending and self._closed.backlog == 0:
            self._roll()
            self._publish()
        self._closed.seal_next()

    def drop_superseded(self, planned_before: float) -> None:
        """Remove forms of segments whose next form was published before this unix time.

        The caller knows that no batch planned before that time is still running.
        """
        self._closed.drop_superseded(planned_before)

    def retain(self, rule: Retention, lowest: int | None, now: float, most: int) -> Pruned | None:
        """Forget what is over the limits of `rule` and no longer needed, about so many segments at most.

        `lowest` is the lowest seq that a target stands at; None: nobody needs anything. Not inside
        a transaction. None if nothing had to go.
        """
        entries = self._closed.prunable()
        size = self._open_bytes() + sum(size_of(entry) for entry in self._closed.entries[len(entries) :])
        rows = self._rows_after(entries)
        found = due(entries, rule, open_bytes=size, open_rows=rows, lowest=lowest, now_us=int(now * 1e6))
        going = at_most(found.entries, most)
        return self.prune(going[-1].number) if going else None

    @property
    def size(self) -> int:
        """What the segments take on disk; the former forms of some, which go soon, not counted."""
        return self._open_bytes() + self._closed.size

    def _open_bytes(self) -> int:
        mark = self._tail.mark
        return mark.length + mark.index_entries * INDEX.itemsize + mark.cut_entries * CUTS.itemsize

    def _rows_after(self, entries: Sequence[Entry]) -> int:
        """How many rows follow the first so many closed segments."""
        staying = self._closed.entries[len(entries) :]
        return self._tail.end.seq - staying[0].first_seq + 1 if staying else self._tail.mark.rows

    def prune(self, segment: int) -> Pruned | None:
        """Forget all closed segments up to this one, as far as transactions end with them.

        The caller knows that nobody needs them. Not inside a transaction. None if there are none.
        """
        return self._closed.prune(segment, self._rows_after(self._closed.prunable()), self._publish)

    def prune_as_requested(self) -> Pruned | None:
        """Do what `millstream journal prune` has asked of this process, if it has. Not inside a transaction."""
        request = PruneRequest.load(self.path)
        if request is None:
            return None
        pruned = self.prune(request.segment)
        PruneRequest.done(self.path)
        return pruned

    def close(self) -> None:
        """Commit what is whole, keep every id that was given, stop sealing, release the lock. Idempotent."""
        if self._head_file.closed:
            return
        try:
            self._relations.sync()
            self.commit()
            if self._closed.finish():
                self._publish()
        finally:
            self._closed.close()
            self._tail.close()
            self._relations.close()
            self._schemas.close()
            self._head_file.close()
            self._lock.release()

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _go_back(self) -> None:
        """Forget everything since the last commit, on disk and in memory."""
        self._tail.go_back()
        self._pending.reset(self._tail.end)
        self._schemas.go_back(self._tail.end.seq)
        self._looks.go_back(self._tail.end.covered)

    def _publish(self) -> None:
        """Let readers see what is committed, and the closed segments as they are now."""
        mark, end = self._tail.mark, self._tail.end
        head = Head(
            journal_id=self.header.journal_id,
            epoch=self._epoch,
            seq=end.seq,
            commit_position=end.commit_position,
            resume_position=end.resume_position,
            covered=end.covered,
            commit_ts_us=end.commit_ts_us,
            segment=segment_name(mark.number),
            segment_first_seq=mark.first_seq,
            segment_length=mark.length,
            index_entries=mark.index_entries,
            cut_entries=mark.cut_entries,
            relations_bytes=self._relations.bytes,
            manifest_version=self._closed.version,
            published_us=time.time_ns() // 1000,
            left=self._pending.left,
        )
        self._head_file.publish(head)
        self.head = head
        self._closed.published()


def _same(head: Head | None, header: Header) -> bool:
    return head is not None and head.journal_id == header.journal_id
