"""Values of one type as another, a column at a time: exactly, or not at all."""

from __future__ import annotations

import hashlib

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from millstream.latest import booleans
from millstream.transforms.block import truths
from millstream.wire.json_columns import json_text
from millstream.wire.text import decimal_text

_INTEGERS = (pa.int16(), pa.int32(), pa.int64())


def can_cast(have: pa.DataType, want: pa.DataType) -> bool:
    """Whether there are values of one type that are some of the other."""
    if have == want:
        return True
    if types.is_string(want):
        return not types.is_binary(have)
    if types.is_string(have):
        return not types.is_nested(want)
    numbers = [types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) for kind in (have, want)]
    if all(numbers):
        return not (types.is_floating(have) and types.is_decimal(want))
    moments = [types.is_date(kind) or types.is_timestamp(kind) for kind in (have, want)]
    return all(moments) or (types.is_boolean(have) and types.is_integer(want))


def keeps_apart(have: pa.DataType, want: pa.DataType) -> bool:
    """Whether different values stay different: what a cast of a key must do."""
    if have == want or types.is_string(want):
        return True
    return have in _INTEGERS and want in _INTEGERS and _INTEGERS.index(have) < _INTEGERS.index(want)


def text_of(array: pa.Array) -> pa.StringArray:
    """The text that the source would give: of lists and structs JSON, of timestamps no zeros at the end."""
    if types.is_string(array.type):
        return array
    if types.is_decimal(array.type):
        return decimal_text(array)
    if types.is_timestamp(array.type):
        text = array.cast(pa.timestamp("us")).cast(pa.string())
        text = pc.replace_substring_regex(pc.replace_substring_regex(text, r"(\.\d*?)0+$", r"\1"), r"\.$", "")
        return pc.binary_join_element_wise(text, "+00", "") if array.type.tz is not None else text
    if types.is_nested(array.type):
        text = json_text(array)
        return pc.if_else(array.is_valid(), text, None) if array.null_count else text
    return array.cast(pa.string())


def exact_text(array: pa.Array, special: pa.StringArray | None) -> pa.StringArray:
    """The same, and the exact text of values that the column cannot hold."""
    return text_of(array) if special is None else pc.coalesce(special, text_of(array))


def cast(array: pa.Array, special: pa.StringArray | None, to: pa.DataType) -> pa.Array:
    """The values as another type. Raises ArrowInvalid where one has no exact form in it."""
    if types.is_string(to):
        return exact_text(array, special)
    if special is not None and special.null_count < len(special):
        if not types.is_floating(to):
            raise pa.ArrowInvalid("a value without a home")
        return pc.coalesce(array.cast(to), special.cast(to))
    if types.is_integer(array.type) and types.is_decimal(to):
        # Arrow wants room for the largest number of the type, not for those that are there.
        return array.cast(pa.decimal128(19, 0)).cast(pa.decimal128(38, to.scale)).cast(to)
    return array.cast(to)


def hashed(array: pa.Array, special: pa.StringArray | None, salt: bytes) -> pa.StringArray:
    """SHA-256 over salt and value, as 64 digits. NULL stays NULL. Each distinct value is hashed once."""
    plain = array if types.is_binary(array.type) else exact_text(array, special)
    coded = plain.dictionary_encode()
    start = hashlib.sha256(salt)
    digests = []
    for value in coded.dictionary.to_pylist():
        one = start.copy()
        one.update(value if isinstance(value, bytes) else value.encode())
        digests.append(one.hexdigest())
    return pa.array(digests, pa.string()).take(coded.indices)


def masked(array: pa.Array, special: pa.StringArray | None, text: str) -> pa.StringArray:
    """This text instead of every value. NULL stays NULL."""
    there = booleans(array.is_valid())
    if special is not None:
        there |= booleans(special.is_valid())
    return pc.if_else(truths(there), text, pa.scalar(None, pa.string()))
