"""Stream files: YAML in, streams out, or every problem with its place. No Spark in here.

Names are imported when they are first asked for: a capture process needs the units, and no schema of stream files.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream.config.load import load_streams
    from millstream.config.problems import Problem, StreamFileError

__all__ = ["Problem", "StreamFileError", "load_streams"]

_HOMES = {"Problem": "problems", "StreamFileError": "problems", "load_streams": "load"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
