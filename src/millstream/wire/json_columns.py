"""Columns as JSON text, a column at a time: every value exact, no Python per row.

    boolean, integers           as they are; integers of 64 bits too, with all their digits
    float, double               the shortest text that gives the same number; "NaN", "Infinity", "-Infinity"
    decimal                     a string with all digits of the scale: readers make doubles of numbers
    string                      a string
    binary                      a string, base64
    date, time                  a string: "2026-01-31", "12:30:00.000000"
    timestamp                   a string: "2026-01-31T12:30:00.000000", with Z where it is an instant
    array, struct, map          an array, an object, an object with its keys as strings
    anything else               a string with Arrow's text of it

Spark's `from_json` reads all of this back into the same types.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from millstream.wire.text import base64_text, decimal_text

NULL = "null"

_ESCAPED = "\\\\" + '"' + "\\x00-\\x1f"


def json_text(array: pa.Array) -> pa.StringArray:
    """The JSON text of each value; the text `null` where there is none."""
    if types.is_null(array.type):
        return pa.array([NULL], pa.string()).take(pa.array(np.zeros(len(array), np.int32)))
    text = next(make for fits, make in _MAKERS if fits(array.type))(array)
    return pc.fill_null(text, NULL) if text.null_count else text


def json_objects(names: Sequence[str], values: Sequence[pa.Array]) -> pa.StringArray:
    """Objects of these members, one per row. `values` are JSON texts; a member that is NULL is left out."""
    if not names:
        raise ValueError("an object without members has no rows to count")
    members = [
        pc.fill_null(pc.binary_join_element_wise(f",{json.dumps(name, ensure_ascii=False)}:", value, ""), "")
        for name, value in zip(names, values, strict=True)
    ]
    joined = pc.binary_join_element_wise(*members, "")
    return pc.binary_join_element_wise("{", pc.utf8_slice_codeunits(joined, 1), "}", "")


def quoted(array: pa.Array) -> pa.StringArray:
    """Strings as JSON strings. NULL stays NULL."""
    if pc.any(pc.match_substring_regex(array, f"[{_ESCAPED}]")).as_py():
        array = pc.replace_substring(array, "\\", "\\\\")
        array = pc.replace_substring(array, '"', '\\"')
        for code in range(32):
            character = chr(code)
            if pc.any(pc.match_substring(array, character)).as_py():
                array = pc.replace_substring(array, character, json.dumps(character)[1:-1])
    return _in_quotes(array)


def _in_quotes(text: pa.Array) -> pa.StringArray:
    return pc.binary_join_element_wise('"', text, '"', "")


def _plain(array: pa.Array) -> pa.StringArray:
    return array.cast(pa.string())


def _float(array: pa.Array) -> pa.StringArray:
    text = array.cast(pa.string())
    # Many readers take "-0" for an integer, which has no sign then.
    text = pc.if_else(pc.equal(text, "-0"), "-0.0", text)
    finite = pc.fill_null(pc.is_finite(array), True)
    if pc.all(finite).as_py():
        return text
    positive = pc.if_else(pc.greater(array, pa.scalar(0, array.type)), '"Infinity"', '"-Infinity"')
    return pc.if_else(finite, text, pc.if_else(pc.is_nan(array), '"NaN"', positive))


def _timestamp(array: pa.Array) -> pa.StringArray:
    return _in_quotes(pc.replace_substring(array.cast(pa.string()), " ", "T", max_replacements=1))


def _list(array: pa.Array) -> pa.StringArray:
    lists = _regrouped(array, json_text(array.flatten()))
    return _unless_null(array, pc.binary_join_element_wise("[", pc.binary_join(lists, ","), "]", ""))


def _struct(array: pa.StructArray) -> pa.StringArray:
    names = [field.name for field in array.type]
    if not names:
        return _unless_null(array, pa.array(["{}"]).take(pa.array(np.zeros(len(array), np.int32))))
    return _unless_null(array, json_objects(names, [json_text(pc.struct_field(array, i)) for i in range(len(names))]))


def _map(array: pa.MapArray) -> pa.StringArray:
    entries = array.cast(pa.list_(pa.struct([("key", array.type.key_type), ("value", array.type.item_type)]))).flatten()
    keys, values = pc.struct_field(entries, 0), pc.struct_field(entries, 1)
    key_text = quoted(keys) if types.is_string(keys.type) else _in_quotes(keys.cast(pa.string()))
    members = _regrouped(array, pc.binary_join_element_wise(key_text, json_text(values), ":"))
    return _unless_null(array, pc.binary_join_element_wise("{", pc.binary_join(members, ","), "}", ""))


def _regrouped(array: pa.Array, texts: pa.Array) -> pa.ListArray:
    """The texts of a list's elements, in the lists that these stood in; none where the list is NULL."""
    lengths = pc.fill_null(pc.list_value_length(array), 0) if not types.is_map(array.type) else _map_lengths(array)
    offsets = np.concatenate([[0], np.cumsum(np.asarray(lengths))]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), texts)


def _map_lengths(array: pa.MapArray) -> pa.Array:
    offsets = np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, array.offset * 4)
    return np.where(np.asarray(array.is_valid()), np.diff(offsets), 0)


def _unless_null(array: pa.Array, text: pa.Array) -> pa.StringArray:
    return pc.if_else(array.is_valid(), text, None) if array.null_count else text


_Maker = Callable[[pa.Array], pa.StringArray]
_MAKERS: list[tuple[Callable[[pa.DataType], bool], _Maker]] = [
    (types.is_string, quoted),
    (types.is_boolean, _plain),
    (types.is_integer, _plain),
    (types.is_floating, _float),
    (types.is_decimal128, lambda array: _in_quotes(decimal_text(array))),
    (types.is_binary, lambda array: _in_quotes(base64_text(array))),
    (types.is_timestamp, _timestamp),
    (types.is_list, _list),
    (types.is_struct, _struct),
    (types.is_map, _map),
    (lambda _: True, lambda array: _in_quotes(array.cast(pa.string()))),
]
