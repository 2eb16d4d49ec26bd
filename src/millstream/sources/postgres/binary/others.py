"""Bytes, bits, identifiers, addresses of networks and shapes: all of them text, but for bytea."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.sources.postgres import casts
from millstream.sources.postgres.binary.cells import Values, lists, refuse
from millstream.sources.postgres.binary.floats import float_texts
from millstream.sources.postgres.binary.lines import Lines, hexed
from millstream.sources.postgres.casts import NONE, Casted, Octets, Reader
from millstream.sources.postgres.cells import Bools, Ints, integers, strings


@dataclass(frozen=True)
class Versioned:
    """Reads a type that is sent as a byte of version, which is 1, and its text."""

    what: str

    def __call__(self, cells: pa.Array, to: pa.DataType) -> Casted:
        values = Values(cells)
        if (values.sizes < 1).any() or (values.at(values.first, "u1", self.what) != 1).any():
            refuse(self.what)
        return casts.text(values.spread(values.cut(values.first + 1, values.last)), to)


def char(cells: pa.Array, to: pa.DataType) -> Casted:
    """One byte: zero is the empty text, and one beyond ASCII is written in octal, as it is since Postgres 16."""
    values = Values(cells)
    return values.spread(_CHARS.take(integers(values.fixed(1, '"char"')[:, 0]))), NONE


_CHARS = strings(["", *map(chr, range(1, 128)), *(f"\\{octet:o}" for octet in range(128, 256))])


def bytea(cells: pa.Array, to: pa.DataType) -> Casted:
    if not pa.types.is_string(to):
        return cells.cast(to), NONE
    values = Values(cells)
    begin, end = (int(values.first[0]), int(values.last[-1])) if len(values) else (0, 0)
    if end - begin != int(values.sizes.sum()):
        return bytea(casts.without(cells, NONE), to)
    digits = values.text(hexed(values.data[begin:end]), 2 * values.sizes)
    return pc.binary_join_element_wise("\\x", digits, ""), NONE


def bits(cells: pa.Array, to: pa.DataType) -> Casted:
    """How many, then the bits, eight in a byte."""
    values = Values(cells)
    if (values.sizes < 4).any():
        refuse("bit")
    count = values.at(values.first, ">i4", "bit").astype(np.int64)
    if (values.sizes != 4 + (count + 7) // 8).any() or (count < 0).any():
        refuse("bit")
    size = values.sizes - 4
    row = np.repeat(np.arange(len(values)), size)
    place = np.arange(len(row)) - (np.cumsum(size) - size)[row]
    octets = values.data[values.first[row] + 4 + place]
    letters: Octets = np.unpackbits(octets) + np.uint8(ord("0"))
    number = (8 * place)[:, None] + np.arange(8)
    kept: Bools = number < count[row][:, None]
    return values.text(letters[kept.reshape(-1)], count), NONE


def uuid(cells: pa.Array, to: pa.DataType) -> Casted:
    values = Values(cells)
    digits = hexed(values.fixed(16, "uuid"))
    letters = np.full((len(values), 36), ord("-"), np.uint8)
    for at, begin, end in ((0, 0, 8), (9, 8, 12), (14, 12, 16), (19, 16, 20), (24, 20, 32)):
        letters[:, at : at + end - begin] = digits[:, begin:end]
    return values.text(letters.reshape(-1), np.full(len(values), 36)), NONE


@dataclass(frozen=True)
class HardwareAddress:
    """Reads macaddr (6 bytes) and macaddr8 (8): two digits a byte, with colons between."""

    octets: int
    what: str

    def __call__(self, cells: pa.Array, to: pa.DataType) -> Casted:
        values = Values(cells)
        digits = hexed(values.fixed(self.octets, self.what))
        letters = np.full((len(values), 3 * self.octets - 1), ord(":"), np.uint8)
        letters[:, 0::3], letters[:, 1::3] = digits[:, 0::2], digits[:, 1::2]
        return values.text(letters.reshape(-1), np.full(len(values), 3 * self.octets - 1)), NONE


def pg_lsn(cells: pa.Array, to: pa.DataType) -> Casted:
    values = Values(cells)
    position = values.numbers(">u8", "pg_lsn")
    lines = Lines(len(values))
    lines.hexadecimal(position >> np.uint64(32), 8, upper=True)
    lines.word("/")
    lines.hexadecimal(position & np.uint64(0xFFFFFFFF), 8, upper=True)
    return values.text(*lines.done()), NONE


def tid(cells: pa.Array, to: pa.DataType) -> Casted:
    """Block and item: `(0,1)`."""
    values = Values(cells)
    raw = values.fixed(6, "tid")
    lines = Lines(len(values))
    lines.word("(")
    lines.number(np.ascontiguousarray(raw[:, :4]).view(">u4").reshape(-1), 10)
    lines.word(",")
    lines.number(np.ascontiguousarray(raw[:, 4:]).view(">u2").reshape(-1), 5)
    lines.word(")")
    return values.text(*lines.done()), NONE


def snapshot(cells: pa.Array, to: pa.DataType) -> Casted:
    """Lowest, highest and the running ones: `10:20:10,14,15`."""
    values = Values(cells)
    if (values.sizes < 20).any():
        refuse("pg_snapshot")
    count = values.at(values.first, ">i4", "pg_snapshot").astype(np.int64)
    if (values.sizes != 20 + 8 * count).any() or (count < 0).any():
        refuse("pg_snapshot")
    low, high = (integers(values.at(values.first + at, ">i8", "pg_snapshot")).cast(pa.string()) for at in (4, 12))
    running = integers(values.at(_each(values.first + 20, count, 8), ">i8", "pg_snapshot")).cast(pa.string())
    listed = pc.binary_join(lists(running, count), ",")
    return values.spread(pc.binary_join_element_wise(low, high, listed, ":")), NONE


# Shapes: numbers of float8, in the brackets of their kind


@dataclass(frozen=True)
class Shape:
    """Reads a shape with a fixed count of numbers, written where `form` has a `#`."""

    form: str
    what: str

    def __call__(self, cells: pa.Array, to: pa.DataType) -> Casted:
        parts = self.form.split("#")
        count = len(parts) - 1
        values = Values(cells)
        raw = np.ascontiguousarray(values.fixed(8 * count, self.what)).view(">f8").astype(np.float64)
        pieces: list[pa.Array | str] = [parts[0]]
        for number in range(count):
            pieces += [float_texts(np.ascontiguousarray(raw[:, number])), parts[number + 1]]
        joined = pc.binary_join_element_wise(*pieces, "") if len(values) else pa.nulls(0, to)
        return values.spread(joined), NONE


def path(cells: pa.Array, to: pa.DataType) -> Casted:
    """A byte that says whether it is closed, then as a polygon; open ones stand in square brackets."""
    values = Values(cells)
    if (values.sizes < 1).any():
        refuse("path")
    closed = values.at(values.first, "u1", "path") != 0
    points = _points(values, values.first + 1, "path")
    begin, end = (strings(pair).take(integers(closed.astype(np.int64))) for pair in (["[", "("], ["]", ")"]))
    return values.spread(pc.binary_join_element_wise(begin, points, end, "")), NONE


def polygon(cells: pa.Array, to: pa.DataType) -> Casted:
    values = Values(cells)
    return values.spread(pc.binary_join_element_wise("(", _points(values, values.first, "polygon"), ")", "")), NONE


def _points(values: Values, at: Ints, what: str) -> pa.Array:
    """`(1,2),(3,4)` of the points whose count stands at these places, and which end with the value."""
    if (at + 4 > values.last).any():
        refuse(what)
    count = values.at(at, ">i4", what).astype(np.int64)
    if (at + 4 + 16 * count != values.last).any() or (count < 0).any():
        refuse(what)
    place = _each(at + 4, count, 16)
    x, y = (float_texts(values.at(place + offset, ">f8", what)) for offset in (0, 8))
    if not len(place):
        return strings([""] * len(at))
    return pc.binary_join(
        lists(pc.binary_join_element_wise("(", pc.binary_join_element_wise(x, y, ","), ")", ""), count), ","
    )


def _each(begin: Ints, count: Ints, size: int) -> Ints:
    """The places of `count` things of one size that follow each other from each of `begin`."""
    row = np.repeat(np.arange(len(begin)), count)
    place: Ints = begin[row] + size * (np.arange(len(row)) - (np.cumsum(count) - count)[row])
    return place


READERS: dict[str, Reader] = {
    **dict.fromkeys(("text", "varchar", "bpchar", "name", "json", "xml", "refcursor", "pg_node_tree"), casts.text),
    "jsonb": Versioned("jsonb"),
    "jsonpath": Versioned("jsonpath"),
    "char": char,
    "bytea": bytea,
    "pg_mcv_list": bytea,
    "bit": bits,
    "varbit": bits,
    "uuid": uuid,
    "macaddr": HardwareAddress(6, "macaddr"),
    "macaddr8": HardwareAddress(8, "macaddr8"),
    "pg_lsn": pg_lsn,
    "tid": tid,
    "pg_snapshot": snapshot,
    "txid_snapshot": snapshot,
    "point": Shape("(#,#)", "point"),
    "line": Shape("{#,#,#}", "line"),
    "lseg": Shape("[(#,#),(#,#)]", "lseg"),
    "box": Shape("(#,#),(#,#)", "box"),
    "circle": Shape("<(#,#),#>", "circle"),
    "path": path,
    "polygon": polygon,
}
