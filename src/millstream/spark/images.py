"""Changes as rows that Spark's SQL can work on, and back.

A change has up to two *images*: its new row, and its old one. Each is a row of a DataFrame in the table's columns,
with ours beside them:

    _ms_op .. _ms_schema   of the change, on each of its images
    _ms_image              0 the new row, or what there is instead of it; 1 the old row; 2 no image but a note
    _ms_in                 whether the row is inside the filters, as far as they were looked at
    _ms_unknown            columns that did not change and were not sent
    _ms_special            exact texts of values that their column cannot hold
    _ms_note               JSON, of a note: how many changes went before it, and how many were left out; or an error; or
                           a change that cannot be transformed, as it goes on (`transforms.aside`). Of a row, where it
                           is asked for: what fails on it
    _ms_lacks              of a new row whose change did not send what a transform needs: the reason. No SQL sees it

Images of a change follow each other, changes are in seq order, notes that are no changes come last; SQL that works row
by row keeps that.
A task that fails says so in a note, since what Spark says of it may hold a user's value.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.changelog import COMMON
from millstream.errors import RowUnshaped
from millstream.latest import Bools, booleans, one_letter, special_texts, unsent_masks, whole, whole_numbers
from millstream.model import Json, Relation
from millstream.sources.decoders import decoded_schema
from millstream.spark.changes import Aside
from millstream.spark.stage import describe
from millstream.targets.rejects import Outstanding, packed
from millstream.transforms.block import Block, name_lists, text_maps, truths
from millstream.transforms.changes import WRITTEN, Rows, apart
from millstream.transforms.compiled import Compiled, recompiled
from millstream.transforms.lacking import needed_anyway, needed_by_filters, needed_by_transforms
from millstream.transforms.shape import Shaping
from millstream.transforms.sql import Output, SqlStep

NEW, OLD, NOTE = 0, 1, 2

_CHANGE = [field for field in COMMON if field.name not in ("_ms_deleted", "_ms_unchanged", "_ms_special")]
OWN = pa.schema(
    [
        *(pa.field(field.name, field.type) for field in _CHANGE),
        pa.field("_ms_image", pa.int32()),
        pa.field("_ms_in", pa.bool_()),
        pa.field("_ms_unknown", pa.list_(pa.string())),
        pa.field("_ms_special", pa.map_(pa.string(), pa.string())),
        pa.field("_ms_note", pa.string()),
        pa.field("_ms_lacks", pa.string()),
    ]
)
"""Our own columns, which come after the table's."""
_LAST = np.iinfo(np.int64).max
"""The seq of a note: it comes after all images."""


def image_schema(columns: Sequence[tuple[str, pa.DataType]]) -> pa.Schema:
    """The schema of images of a table with these columns."""
    return pa.schema([*(pa.field(name, kind) for name, kind in columns), *OWN])


@dataclass(frozen=True)
class Binding:
    """Filters and transforms bound to a table with Spark's help, as tasks are given them. Picklable."""

    shaping: Shaping
    relation: Relation
    outputs: tuple[tuple[Output, ...], ...]

    def bound(self) -> Compiled:
        return _bound(self, self.shaping.key())


@lru_cache(maxsize=256)
def _bound(binding: Binding, _: str) -> Compiled:
    return recompiled(binding.shaping, binding.relation, binding.outputs)


def split(
    binding: Binding,
    changes: Iterable[pa.RecordBatch],
    left_out: Callable[[], int],
    relation_id: int = 0,
    outstanding: Outstanding | None = None,
) -> Iterator[pa.RecordBatch]:
    """The images of a table's changes, in its source's columns; at the end their count.

    `left_out` is asked last, for the number of rows that were read and are not in `changes`.
    """
    bound = binding.bound()
    schema = image_schema(source_columns(bound))
    aside = Aside(bound, binding.relation, relation_id, outstanding, mirrors=binding.shaping.mirrors)
    return noting_errors(schema, _split(bound, changes, left_out, aside, schema))


def _split(
    bound: Compiled, changes: Iterable[pa.RecordBatch], left_out: Callable[[], int], aside: Aside, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    rule, count, dropped = bound.rule, 0, 0
    for batch in changes:
        for piece, fit in aside.pieces(batch):
            if not fit:
                stub = aside.stub(piece)
                if stub is None:
                    dropped += 1
                else:
                    count += 1
                    yield _stub_note(stub, schema)
                continue
            rows = apart(piece, rule)
            inside = rule.meets(rows.new), rule.meets(rows.old)
            lacking = needed_by_filters(bound, rows)
            if lacking is None and not bound.conditions:
                lacking = needed_by_transforms(bound, rows, *inside)
            if lacking is not None:
                # Nothing of the batch will be written.
                aside.reject_unsent(piece, lacking)
                continue
            # Whether SQL lets a row go on is not known yet.
            lacking = needed_anyway(bound, rows.new) if bound.conditions else None
            count += piece.num_rows
            yield _images(piece, rows, inside, lacking, rule.key, schema)
    aside.check()
    yield note({"changes": count, "left_out": left_out() + dropped}, schema)


def _stub_note(stub: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A change that passes by all filters and transforms, in its place among the others."""
    said = {"change": base64.b64encode(packed(pa.Table.from_batches([stub]))).decode()}
    return note(said, schema, _ms_seq=stub["_ms_seq"][0].as_py(), _ms_event_id=stub["_ms_event_id"][0].as_py())


def noting_errors(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches; an error ends them with a note of it."""
    try:
        yield from batches
    except Exception as failed:  # noqa: BLE001 - named to the driver, which raises it there
        yield note({"error": describe(failed)}, schema)


def note(said: Json, schema: pa.Schema, **place: object) -> pa.RecordBatch:
    """A note among images: after all of them, or in a place of its own."""
    row = {"_ms_seq": _LAST, "_ms_image": NOTE, "_ms_in": False, "_ms_note": json.dumps(said), **place}
    return pa.RecordBatch.from_pylist([row], schema=schema)


def _images(
    batch: pa.RecordBatch,
    rows: Rows,
    inside: tuple[Bools, Bools],
    lacking: pa.StringArray | None,
    key: frozenset[str],
    schema: pa.Schema,
) -> pa.RecordBatch:
    new, old = rows.new.only(inside[0], key), rows.old.only(inside[1], key)
    olds = np.flatnonzero(rows.has_old)
    size = batch.num_rows
    # Each old row right after its new one.
    order = np.argsort(np.concatenate([np.arange(size) * 2, olds * 2 + 1]), kind="stable")
    change = np.concatenate([np.arange(size), olds])[order]
    both = joined(new, old.take(olds)).take(order)
    image = np.concatenate([np.full(size, NEW, np.int32), np.full(len(olds), OLD, np.int32)])[order]
    meets = np.concatenate([inside[0], inside[1][olds]])[order]
    of_change = batch.select([field.name for field in _CHANGE]).take(whole_numbers(change))
    of_change = of_change.append_column("_ms_note", pa.nulls(len(change), pa.string()))
    lacks = pa.nulls(len(change), pa.string())
    if lacking is not None:
        lacks = pc.if_else(truths(image == NEW), lacking.take(whole_numbers(change)), lacks)
    of_change = of_change.append_column("_ms_lacks", lacks)
    return written(both, of_change, image, meets, schema)


def written(
    block: Block, of_change: pa.RecordBatch, image: np.ndarray, meets: Bools, schema: pa.Schema
) -> pa.RecordBatch:
    """A block as images."""
    own = {
        "_ms_image": pa.array(image, pa.int32()),
        "_ms_in": truths(meets),
        "_ms_unknown": name_lists(block.unknown, block.size),
        "_ms_special": text_maps(block.special, block.size),
    }
    columns = [
        own[name] if name in own else of_change[name] if name in OWN.names else block.values[name]
        for name in schema.names
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def joined(one: Block, other: Block) -> Block:
    """The rows of two blocks, one after another."""
    size = one.size + other.size

    def texts(block: Block, name: str) -> pa.Array:
        return block.special.get(name, pa.nulls(block.size, pa.string()))

    def unknown(block: Block, name: str) -> Bools:
        return block.unknown.get(name, np.zeros(block.size, bool))

    return Block(
        size,
        {name: pa.concat_arrays([array, other.values[name]]) for name, array in one.values.items()},
        {n: pa.concat_arrays([texts(one, n), texts(other, n)]) for n in {**one.special, **other.special}},
        {n: np.concatenate([unknown(one, n), unknown(other, n)]) for n in {**one.unknown, **other.unknown}},
    )


@dataclass(frozen=True)
class Images:
    """A batch of images, read back from Spark."""

    batch: pa.RecordBatch
    """Our own columns of them."""
    block: Block
    image: np.ndarray
    meets: Bools

    @classmethod
    def read(cls, batch: pa.RecordBatch, columns: Sequence[tuple[str, pa.DataType]], was: Sequence[str]) -> Images:
        """`columns` are those that the table has now, `was` the ones that unknown values and exact texts are of."""
        own = {field.name: batch[field.name].cast(field.type) for field in OWN}
        table = pa.table({"_ms_special": own["_ms_special"]})
        texts = special_texts(table)
        unknown = unsent_masks(whole(pa.chunked_array([own["_ms_unknown"]])))
        block = Block(
            batch.num_rows,
            {name: batch[name].cast(kind) for name, kind in columns},
            {name: text for name, text in texts.items() if name in was},
            {name: mask for name, mask in unknown.items() if name in was},
        )
        image = np.frombuffer(own["_ms_image"].buffers()[1], np.int32, batch.num_rows, own["_ms_image"].offset * 4)
        return cls(
            pa.RecordBatch.from_pydict(own, schema=OWN), block, image, booleans(pc.fill_null(own["_ms_in"], False))
        )


def arrow_part(
    binding: Binding, begin: int, end: int, *, isolate: bool = False
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function for `mapInArrow` that does transforms without SQL: the parts from `begin` to before `end`.

    `isolate`: what fails on an image is noted there, and is no error.
    """

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        bound = binding.bound()
        following = bound.parts[end]
        assert isinstance(following, SqlStep)  # noqa: S101 - what comes after the last of Spark's is done in a `Joiner`
        schema = image_schema(following.before)
        made = (stepped_images(bound, carried(bound, one, begin), begin, end, isolate) for one in batches if len(one))
        return noting_errors(schema, (written(i.block, i.batch, i.image, i.meets, schema) for i in made))

    return run


def stepped_images(bound: Compiled, images: Images, begin: int, end: int, isolate: bool) -> Images:
    """The images after these parts, none of which is Spark's. `isolate`: what fails on an image is noted there."""
    try:
        return replace(images, block=stepped(bound, images.block, begin, end))
    except RowUnshaped:
        if not isolate:
            raise
    block, failed = _stepped_apart(bound, images.block, begin, end)
    noted = pc.coalesce(images.batch["_ms_note"], pa.array(failed, pa.string()))
    batch = images.batch.set_column(OWN.get_field_index("_ms_note"), OWN.field("_ms_note"), noted)
    return replace(images, block=block, batch=batch, meets=images.meets & ~booleans(noted.is_valid()))


def _stepped_apart(bound: Compiled, block: Block, begin: int, end: int) -> tuple[Block, list[str | None]]:
    """The same for a block that fails, cut in two until single rows are left; beside it what fails on which row."""
    try:
        return stepped(bound, block, begin, end), [None] * block.size
    except RowUnshaped as failed:
        if block.size == 1 and failed.column is not None:
            # The rest of the row, its key above all, is what it is.
            nothing = pa.nulls(1, block.values[failed.column].type)
            without = Block(1, {**block.values, failed.column: nothing}, _but(block.special, failed.column))
            made, _ = _stepped_apart(bound, without, begin, end)
            return made, [failed.message]
        if block.size == 1:
            raise
    half = block.size // 2
    halves = [np.arange(half), np.arange(half, block.size)]
    (one, first), (other, second) = (_stepped_apart(bound, block.take(rows), begin, end) for rows in halves)
    return joined(one, other), [*first, *second]


def _but(texts: Mapping[str, pa.StringArray], name: str) -> dict[str, pa.StringArray]:
    return {other: text for other, text in texts.items() if other != name}


def stepped(bound: Compiled, block: Block, begin: int, end: int) -> Block:
    """The block after these parts, none of which is Spark's."""
    for part in bound.parts[begin:end]:
        assert not isinstance(part, SqlStep)  # noqa: S101 - the pipeline is cut there
        block = part(block)
    return block


def last_done(bound: Compiled, begin: int) -> SqlStep | None:
    """What Spark did right before this part, and has not been accounted for."""
    done = bound.parts[begin - 1] if begin else None
    return done if isinstance(done, SqlStep) and done.step.verb != "python" else None


def carried(bound: Compiled, batch: pa.RecordBatch, begin: int) -> Images:
    """The images before this part, with what is unknown and has exact texts after what Spark did."""
    columns, done = columns_from(bound, begin), last_done(bound, begin)
    images = Images.read(batch, columns, [name for name, _ in (columns if done is None else done.before)])
    if done is None:
        return images
    return Images(images.batch, done.carried(images.block, images.block), images.image, images.meets)


def columns_from(bound: Compiled, begin: int) -> list[tuple[str, pa.DataType]]:
    """The columns before a part that is the first, or follows one of Spark's."""
    done = bound.parts[begin - 1] if begin else None
    return list(done.after) if isinstance(done, SqlStep) else source_columns(bound)


def source_columns(bound: Compiled) -> list[tuple[str, pa.DataType]]:
    """The columns that images begin with."""
    return list(zip(bound.rule.names, decoded_schema(bound.source).types, strict=True))


def eligible(images: Images, whole: bool) -> Bools:
    """Which images are rows that a user's function gets: whole ones, inside the filters."""
    op = one_letter(pc.fill_null(images.batch["_ms_op"], "n"))
    there = np.isin(op, WRITTEN) & (images.image == NEW) & booleans(images.batch["_ms_lacks"].is_null())
    found: Bools = (there | ((images.image == OLD) & whole)) & images.meets
    return found
