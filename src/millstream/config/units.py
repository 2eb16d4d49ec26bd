"""Durations and sizes as people write them: `10s`, `200ms`, `5m`, `64MiB`, `16MB`.

A bare number means milliseconds for a duration and bytes for a size. `MB` is 10^6 bytes and `MiB`
is 2^20, as everywhere else.
"""

from __future__ import annotations

import re

_DURATIONS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_SIZES = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_duration_ms(value: object) -> int:
    """Milliseconds of `10s`, `200ms`, `1.5m`, `2h` or a bare number. ValueError says what is expected."""
    return _parse(value, _DURATIONS, "a duration such as 200ms, 10s, 5m or 1h (a bare number is milliseconds)")


def parse_size(value: object) -> int:
    """Bytes of `64MiB`, `4GiB`, `16MB` or a bare number. ValueError says what is expected."""
    return _parse(value, _SIZES, "a size such as 64MiB, 4GiB or 16MB (a bare number is bytes)")


def format_duration(ms: int) -> str:
    """The shortest exact text of a duration: 10000 is `10s`."""
    return _format(ms, ("d", "h", "m", "s"), _DURATIONS, "ms")


def format_size(size: int) -> str:
    """The shortest exact text of a size in binary units: 67108864 is `64MiB`."""
    return _format(size, ("TiB", "GiB", "MiB", "KiB"), {k: _SIZES[k.lower()] for k in ("TiB", "GiB", "MiB", "KiB")}, "")


def _parse(value: object, units: dict[str, int], expected: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"expected {expected}")  # noqa: TRY004 - one kind of error for callers, pydantic among them
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"must not be negative: expected {expected}")
        return value
    match = _QUANTITY.fullmatch(value)
    if match is None:
        raise ValueError(f"{value!r} is not {expected}")
    number, unit = match.groups()
    factor = units.get(unit.lower()) if unit else 1
    if factor is None:
        raise ValueError(f"unknown unit {unit!r} in {value!r}: expected {expected}")
    whole, _, fraction = number.partition(".")
    amount, rest = divmod(int(whole + fraction) * factor, int("1" + "0" * len(fraction)))
    if rest:
        raise ValueError(f"{value!r} is finer than the smallest unit: expected {expected}")
    return amount


def _format(amount: int, names: tuple[str, ...], units: dict[str, int], smallest: str) -> str:
    for name in names:
        if amount and amount % units[name] == 0:
            return f"{amount // units[name]}{name}"
    return f"{amount}{smallest}"
