"""Columns to text where Arrow's own cast is not plain enough, by column."""

from __future__ import annotations

import binascii

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def decimal_text(array: pa.Array) -> pa.StringArray:
    """Decimals with all digits of their scale: 0.10 and never 1E-1. NULL stays NULL."""
    scale = array.type.scale
    # The same 128 bits without a scale: Arrow writes whole numbers plainly.
    whole = pa.Array.from_buffers(pa.decimal128(38, 0), len(array), array.buffers(), offset=array.offset)
    digits = whole.cast(pa.string())
    if scale == 0:
        return digits
    sign = pc.if_else(pc.starts_with(digits, "-"), "-", "")
    padded = pc.ascii_lpad(pc.ascii_ltrim(digits, "-"), scale + 1, "0")
    front = pc.utf8_slice_codeunits(padded, 0, -scale)
    return pc.binary_join_element_wise(sign, front, ".", pc.utf8_slice_codeunits(padded, -scale, None), "")


def base64_text(array: pa.BinaryArray) -> pa.StringArray:
    """Bytes in base64 with padding. NULL stays NULL.

    Each value is moved to a place that is a multiple of three, so that all of them are encoded in one
    go; the padding is put in afterwards.
    """
    rows = len(array)
    offsets = np.frombuffer(array.buffers()[1], np.int32, rows + 1, array.offset * 4).astype(np.int64)
    lengths = np.diff(offsets)
    if array.null_count:
        lengths = np.where(array.is_valid().to_numpy(zero_copy_only=False), lengths, 0)
    starts = np.concatenate([[0], np.cumsum(-(-lengths // 3) * 3)])
    spread = np.zeros(int(starts[-1]), np.uint8)
    data = array.buffers()[2]
    if data is not None and lengths.any():
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        raw = np.frombuffer(data, np.uint8)
        spread[within + np.repeat(starts[:-1], lengths)] = raw[within + np.repeat(offsets[:-1], lengths)]
    text = np.frombuffer(binascii.b2a_base64(spread.tobytes(), newline=False), np.uint8).copy()
    ends, missing = starts[1:] // 3 * 4, -lengths % 3
    text[ends[missing >= 1] - 1] = ord("=")
    text[ends[missing == 2] - 2] = ord("=")
    ends_at = pa.py_buffer((starts // 3 * 4).astype(np.int32))
    encoded = pa.StringArray.from_buffers(rows, ends_at, pa.py_buffer(text))
    return pc.if_else(array.is_valid(), encoded, None) if array.null_count else encoded
