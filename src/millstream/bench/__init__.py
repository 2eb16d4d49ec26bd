"""Measurements that check what they measure: each compares its result with a plain way of doing the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from millstream.bench import decode

BENCHES: Mapping[str, Callable[[], dict[str, Any]]] = {"decode": decode.run}
"""By name. A result says what was measured, in which unit, against what, and whether the content was equal."""
