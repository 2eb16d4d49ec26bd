"""Images back to changes, after SQL has done its part. See `images`."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import TargetRefused
from millstream.latest import Bools, booleans, one_letter, whole_numbers
from millstream.model import Json
from millstream.spark.images import NEW, NOTE, OLD, Images, carried, stepped_images
from millstream.targets.lanes.tables import mirror_key
from millstream.targets.rejects import AT_ONCE, LACKING_AT_ONCE, Unshapable, unpacked
from millstream.transforms.block import Ints
from millstream.transforms.changes import WRITTEN, Rows, going_on, reduced, together
from millstream.transforms.compiled import Compiled


class Joiner:
    """Images back to changes of the filtered and transformed table. For one task; a change is never cut."""

    def __init__(self, bound: Compiled, begin: int, *, isolate: bool = False, skip: bool = False) -> None:
        """The transforms from the part `begin` on are done here; none of them is Spark's.

        `isolate`: rows that something fails on are told by `changes`, together; `skip`: or left out.
        """
        self._bound = bound
        self._begin = begin
        self._isolate = isolate
        self._skip = skip
        self._unshapable: dict[str, str] = {}
        self._waiting: list[pa.RecordBatch] = []
        self.joined = 0
        """How many changes came so far,"""
        self.counted = 0
        """how many there must be by the counts,"""
        self.left_out = 0
        """and how many of what was read are none to the target."""

    def changes(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The changes, in batches that are not empty. Raises Unshapable for those that something fails on, or lacks."""
        for batch in batches:
            yield from self._take(batch)
        yield from self._flush()
        if self._unshapable and not self._skip:
            raise Unshapable(self._unshapable)
        if self.joined != self.counted:
            raise TargetRefused(
                f"{self._bound.source.table}: {self.joined} changes came out of {self.counted} that went in",
                hint="a function must make one row of each, or none, and leave _ms_seq, _ms_event_id and _ms_image",
            )

    def _take(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        begin = 0
        for at in np.flatnonzero(np.asarray(pc.equal(batch["_ms_image"], NOTE))).tolist():
            yield from self._images(batch.slice(begin, at - begin))
            yield from self._noted(json.loads(batch["_ms_note"][at].as_py()))
            begin = at + 1
        yield from self._images(batch.slice(begin))

    def _noted(self, said: Json) -> Iterator[pa.RecordBatch]:
        if "error" in said:
            raise Named(said["error"])
        if "change" in said:
            yield from self._flush()
            self.joined += 1
            yield from unpacked(base64.b64decode(said["change"])).to_batches()
            return
        self.counted += said["changes"]
        self.left_out += said["left_out"]

    def _images(self, images: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        if not images.num_rows:
            return
        # The last change may go on in the next batch.
        news = np.flatnonzero(np.asarray(pc.equal(images["_ms_image"], NEW)))
        last = int(news[-1]) if len(news) else None
        if last is None:
            self._waiting.append(images)
            return
        self._waiting.append(images.slice(0, last))
        yield from self._flush()
        self._waiting = [images.slice(last)]

    def _flush(self) -> Iterator[pa.RecordBatch]:
        waiting, self._waiting = [one for one in self._waiting if one.num_rows], []
        if waiting:
            made = self._join(pa.concat_batches(waiting))
            if made.num_rows:
                yield made

    def _join(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        images = carried(self._bound, batch, self._begin)
        images = stepped_images(self._bound, images, self._begin, len(self._bound.parts), self._isolate)
        images, failing = self._set_aside(images)
        block = images.block
        news, olds = np.flatnonzero(images.image == NEW), np.flatnonzero(images.image == OLD)
        self.joined += len(news)
        # An old row comes right after its new one: which change it is of is how many new ones came before it.
        change = np.cumsum(images.image == NEW) - 1
        place: Ints = np.full(len(news), -1, np.int64)
        place[change[olds]] = olds
        has_old = place >= 0
        at = np.maximum(place, 0)
        unknown = has_old & failing[at]
        old = block.take(at).only(has_old, frozenset()).only(~unknown, frozenset(mirror_key(self._bound.relation)))
        rule, bound = self._bound.rule, self._bound
        of_change = images.batch.take(whole_numbers(news))
        rows = Rows(one_letter(of_change["_ms_op"]), block.take(news), old, has_old)
        # Nobody can say of an old row that a filter fails on that it was outside.
        new_in, old_in = images.meets[news], (images.meets[at] & has_old) | unknown
        going, rows = self._set_lacking_aside(*going_on(of_change, rows, rule, new_in, old_in))
        self.left_out += len(news) - len(rows.op)
        rows = reduced(rows, bound.traced, rule.whole)
        return together(going, rows, rule.whole, bound.relation, bound.traced)

    def _set_aside(self, images: Images) -> tuple[Images, Bools]:
        """The images without the changes that something fails on, and which of the old rows something fails on."""
        failing = booleans(images.batch["_ms_note"].is_valid())
        # Of a deleted row the old one counts.
        written = np.isin(one_letter(images.batch["_ms_op"]), WRITTEN)
        poisoned = failing & (images.image == NEW) & written
        if not poisoned.any():
            return images, failing
        self._tell(images.batch.take(whole_numbers(np.flatnonzero(poisoned))), "_ms_note", AT_ONCE)
        news = images.image == NEW
        kept = np.flatnonzero(~poisoned[np.flatnonzero(news)[np.cumsum(news) - 1]])
        self.joined += int(poisoned.sum())
        self.left_out += int(poisoned.sum())
        own = images.batch.take(whole_numbers(kept))
        return Images(own, images.block.take(kept), images.image[kept], images.meets[kept]), failing[kept]

    def _set_lacking_aside(self, going: pa.RecordBatch, rows: Rows) -> tuple[pa.RecordBatch, Rows]:
        """The changes without those that leave a row and did not send what a transform needs."""
        lacking = booleans(going["_ms_lacks"].is_valid()) & np.isin(rows.op, WRITTEN)
        if not lacking.any():
            return going, rows
        self._tell(going.take(whole_numbers(np.flatnonzero(lacking))), "_ms_lacks", LACKING_AT_ONCE)
        kept = np.flatnonzero(~lacking)
        return going.take(whole_numbers(kept)), rows.take(kept)

    def _tell(self, changes: pa.RecordBatch, why: str, most: int) -> None:
        for row in changes.select(["_ms_event_id", why]).slice(0, max(0, most - len(self._unshapable))).to_pylist():
            self._unshapable.setdefault(row["_ms_event_id"], row[why])


class Named(Exception):
    """An error that a task before this one has named already."""

    def __init__(self, error: Json) -> None:
        super().__init__()
        self.error = error
