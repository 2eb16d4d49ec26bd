"""The home that a command is about, as an engine that manages it without running it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream.engine.engine import Engine


def engine_of(home: str | None) -> Engine:
    """The engine of the home that `--home` names, or of the one that is meant without it. Creates nothing."""
    from millstream.engine.engine import Engine
    from millstream.engine.home import Home

    return Engine(Home.locate(home))
