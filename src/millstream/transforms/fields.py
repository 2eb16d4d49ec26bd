"""Field filters: conditions on one column, found for a whole column at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from millstream.errors import ConfigError
from millstream.latest import Bools, booleans
from millstream.transforms.block import Block
from millstream.transforms.casts import can_cast, cast
from millstream.transforms.shape import Constant, FieldFilter

Meets = Callable[[Block], Bools]
"""Which rows of a block meet a condition. NULL meets none, and so does a value that its column cannot hold."""


def field_test(filter: FieldFilter, kind: pa.DataType, table: str) -> Meets:
    """The test for a column of this type. Raises ConfigError where the two do not go together."""
    name, where = filter.column, f"{table}.{filter.column}"
    if filter.test in ("equals", "in"):
        wanted = pa.concat_arrays([_constant(value, kind, where) for value in filter.values])
        return lambda block: _meets(pc.is_in(block.values[name], wanted), block.values[name])
    if not types.is_string(kind):
        raise ConfigError(f"{where} is {kind}, and {filter.test} is for text", hint="use equals, in, or `filter` (SQL)")
    pattern = str(filter.values[0])
    test = pc.starts_with if filter.test == "prefix" else pc.match_substring_regex
    try:
        test(pa.array([""]), pattern)
    except pa.ArrowInvalid:
        raise ConfigError(f"{where}: not a regular expression", hint="the syntax is that of RE2") from None
    return lambda block: _meets(test(block.values[name], pattern), block.values[name])


def _constant(value: Constant, kind: pa.DataType, where: str) -> pa.Array:
    given = pa.array([value])
    exact = not (types.is_floating(given.type) and types.is_decimal(kind))
    alike = isinstance(value, bool) == types.is_boolean(kind) and not types.is_nested(kind)
    if exact and alike and can_cast(given.type, kind):
        try:
            return cast(given, None, kind)
        except pa.ArrowInvalid:
            pass
    hint = "write text in quotes" if types.is_string(kind) else "write dates, times and numbers with a point in quotes"
    raise ConfigError(f"{where} is {kind}, and `{value}` is not", hint=hint)


def _meets(found: pa.BooleanArray, values: pa.Array) -> Bools:
    mask = booleans(pc.fill_null(found, False))
    return mask & booleans(values.is_valid()) if values.null_count else np.asarray(mask)
