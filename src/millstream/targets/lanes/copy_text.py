"""Columns as the text that Postgres takes by COPY, a column at a time: no Python per row."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from millstream.errors import RowRefused
from millstream.targets.lanes.database import Values
from millstream.wire.text import decimal_text

_HEX = np.frombuffer(b"".join(b"%02x" % i for i in range(256)), np.uint16)

_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}
_ROOM = re.compile(r"character varying\((\d+)\)")
_PLAIN = "boolean", "smallint", "integer", "bigint", "real", "double precision", "date"


PIECE_ROWS = 4_096


def copy_text(values: Sequence[Values]) -> Iterator[pa.Buffer]:
    """The rows in the text format of COPY, without the end mark, a few thousand at a time."""
    for begin in range(0, len(values[0].array), PIECE_ROWS):
        yield _lines([each.part(begin, PIECE_ROWS) for each in values])


def _lines(values: Sequence[Values]) -> pa.Buffer:
    cells = [_cells(each) for each in values]
    lines = pc.binary_join_element_wise(*cells, "\t", null_handling="replace", null_replacement="\\N")
    ended = pc.binary_join_element_wise(lines, "\n", "")
    offsets = np.frombuffer(ended.buffers()[1], np.int32, len(ended) + 1, ended.offset * 4)
    return ended.buffers()[2].slice(int(offsets[0]), int(offsets[-1] - offsets[0]))


def value_text(array: pa.Array) -> pa.StringArray:
    """Single values, such as those of keys, as Postgres reads them in a literal."""
    return _element(array)


def plain_text(values: Values) -> pa.StringArray:
    """A column's values as the server reads them, NULL where they are. Raises RowRefused for what it cannot read."""
    text = _text(values)
    if values.special is not None:
        text = pc.coalesce(values.special, text)
    if values.column.tight and (room := _ROOM.fullmatch(values.column.type)) is not None:
        _refuse_longer(values, text, int(room[1]))
    return text


def _cells(values: Values) -> pa.StringArray:
    """A column's cells: escaped, NULL where it is."""
    text = plain_text(values)
    if values.column.type not in _PLAIN and pc.any(pc.match_substring_regex(text, r"[\\\t\n\r]")).as_py():
        for character, escaped in _ESCAPES.items():
            text = pc.replace_substring(text, character, escaped)
    return text


def _refuse_longer(values: Values, text: pa.StringArray, room: int) -> None:
    """The server takes a text that is too long if only blanks are, and drops them: that is another value."""
    if pc.any(pc.greater(pc.utf8_length(text), room)).as_py():
        raise RowRefused(
            f"{values.of or values.column.name}: a text has more characters than the column there has room for",
            hint="change the column's type there to the one it has at the source",
        )


def _text(values: Values) -> pa.StringArray:
    array, kind = values.array, values.column.type
    if types.is_list(array.type):
        return _vector(array) if kind.split("(")[0].endswith(("vector", "halfvec")) else _array(array, kind)
    if types.is_binary(array.type) and kind != "bytea":
        # A source without encoding sends any bytes for text; a column of text here takes text only.
        try:
            return array.cast(pa.string())
        except pa.ArrowInvalid:
            raise RowRefused(
                f"{values.of or values.column.name}: a text is no UTF-8, and the target stores nothing else",
                hint="correct the text at the source, or leave the table out of this stream",
                kind="encoding",
            ) from None
    return _element(array)


def _element(array: pa.Array) -> pa.StringArray:
    if types.is_string(array.type):
        return array
    if types.is_struct(array.type):
        return _interval(array) if "months" in array.type.names else _time_with_zone(array)
    if types.is_decimal(array.type):
        return decimal_text(array)
    if types.is_timestamp(array.type):
        # The session's zone is UTC as well; with a zone Arrow takes twenty times as long.
        array = array.cast(pa.timestamp("us"))
    return _bytea(array) if types.is_binary(array.type) else array.cast(pa.string())


def _interval(array: pa.StructArray) -> pa.StringArray:
    parts = [part.cast(pa.string()) for part in array.flatten()]
    units = [f" {unit} " for unit in ("mons", "days", "microseconds")]
    return pc.binary_join_element_wise(*(each for pair in zip(parts, units, strict=True) for each in pair), "")


def _time_with_zone(array: pa.StructArray) -> pa.StringArray:
    """12:30:00.000001+01:00:00; the hour 24 is one of its own."""
    micros, offset = array.flatten()
    sign = pc.if_else(pc.less(offset, 0), "-", "+")
    seconds = pc.divide(micros, 1_000_000)
    fraction = pc.subtract(micros, pc.multiply(seconds, 1_000_000)).cast(pa.string())
    zone = _clock(pc.abs(offset.cast(pa.int64())))
    return pc.binary_join_element_wise(_clock(seconds), ".", pc.utf8_lpad(fraction, 6, "0"), sign, zone, "")


def _clock(seconds: pa.Int64Array) -> pa.StringArray:
    minutes = pc.divide(seconds, 60)
    hours = pc.divide(minutes, 60)
    parts = hours, pc.subtract(minutes, pc.multiply(hours, 60)), pc.subtract(seconds, pc.multiply(minutes, 60))
    return pc.binary_join_element_wise(*(pc.utf8_lpad(part.cast(pa.string()), 2, "0") for part in parts), ":")


def _bytea(array: pa.BinaryArray) -> pa.StringArray:
    r"""Bytes as \x and their digits."""
    offsets = np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, array.offset * 4).astype(np.int64)
    begin, end = int(offsets[0]), int(offsets[-1])
    raw = np.frombuffer(array.buffers()[2], np.uint8)[begin:end] if end > begin else np.zeros(0, np.uint8)
    doubled = pa.py_buffer(((offsets - begin) * 2).astype(np.int32))
    digits = pa.StringArray.from_buffers(len(array), doubled, pa.py_buffer(_HEX[raw]))
    text = pc.binary_join_element_wise("\\x", digits, "")
    return pc.if_else(array.is_valid(), text, None) if array.null_count else text


def _array(array: pa.ListArray, kind: str) -> pa.StringArray:
    """Lists as {"a",NULL}. The elements of boxes are divided by something else."""
    elements = _element(array.flatten())
    for character in ("\\", '"'):
        elements = pc.replace_substring(elements, character, f"\\{character}")
    inside = pc.fill_null(pc.binary_join_element_wise('"', elements, '"', ""), "NULL")
    return _wrapped(array, inside, ";" if kind == "box[]" else ",", "{}")


def _vector(array: pa.ListArray) -> pa.StringArray:
    return _wrapped(array, _element(array.flatten()), ",", "[]")


def _wrapped(array: pa.ListArray, elements: pa.StringArray, delimiter: str, around: str) -> pa.StringArray:
    lengths = pc.fill_null(pc.list_value_length(array), 0)
    counts = np.frombuffer(lengths.buffers()[1], np.int32, len(lengths), lengths.offset * 4)
    offsets = pa.py_buffer(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
    lists = pa.Array.from_buffers(pa.list_(pa.string()), len(array), [None, offsets], children=[elements])
    text = pc.binary_join_element_wise(around[0], pc.binary_join(lists, delimiter), around[1], "")
    return pc.if_else(array.is_valid(), text, None) if array.null_count else text
