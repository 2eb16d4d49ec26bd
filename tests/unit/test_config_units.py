from __future__ import annotations

import pytest

from millstream.config.units import format_duration, format_size, parse_duration_ms, parse_size


@pytest.mark.parametrize(
    ("text", "ms"),
    [("10s", 10_000), ("200ms", 200), ("5m", 300_000), ("1.5s", 1500), (250, 250), ("250", 250), ("2 h", 7_200_000)],
)
def test_durations_are_read_in_milliseconds(text: object, ms: int) -> None:
    assert parse_duration_ms(text) == ms


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MiB", 64 << 20), ("4GiB", 4 << 30), ("16MB", 16_000_000), ("1.5KiB", 1536), (7, 7), ("7B", 7), ("1kb", 1000)],
)
def test_sizes_are_read_in_bytes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("value", ["", "s", "10 parsecs", "-1s", -1, 1.5, True, None, "1.5ms", "MiB"])
def test_what_is_no_duration_is_refused_with_examples(value: object) -> None:
    with pytest.raises(ValueError, match=r"200ms, 10s, 5m"):
        parse_duration_ms(value)


@pytest.mark.parametrize("value", ["", "10s", "-1MiB", -1, 2.5, False, None, "0.5B"])
def test_what_is_no_size_is_refused_with_examples(value: object) -> None:
    with pytest.raises(ValueError, match=r"64MiB, 4GiB"):
        parse_size(value)


def test_formatting_is_exact_and_reads_back() -> None:
    for ms in (0, 1, 999, 1000, 1500, 60_000, 90_000, 86_400_000):
        assert parse_duration_ms(format_duration(ms)) == ms
    for size in (0, 1, 1023, 1024, 1536, 64 << 20, 4 << 30, (4 << 30) + 1):
        assert parse_size(format_size(size)) == size
    assert (format_duration(10_000), format_size(64 << 20)) == ("10s", "64MiB")
