"""What a bench looks like while it runs, and its table afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from millstream.cli.output import console

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    from millstream.bench.frame import Steps
    from millstream.model import Json


class _Quiet:
    """Notes only: for pipes and machines."""

    def plan(self, steps: int) -> None:
        """Nobody looks."""

    def step(self, text: str) -> None:
        """Nobody looks."""

    def note(self, text: str) -> None:
        console(stderr=True).print(text)


class _Live(_Quiet):
    """A line that moves, below the notes."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=None)
        self._planned = 0
        self._begun = False

    def plan(self, steps: int) -> None:
        self._planned += steps
        self._progress.update(self._task, total=self._planned)

    def step(self, text: str) -> None:
        # A step is done when the next one begins; those before the plan are not counted.
        done = 1 if self._begun and self._planned else 0
        self._begun = self._planned > 0
        self._progress.update(self._task, description=text, advance=done)

    def note(self, text: str) -> None:
        self._progress.console.print(text)


@contextmanager
def display(*, live: bool) -> Iterator[Steps]:
    """Where a bench says what it is at: on a terminal if `live`, else only what must be known."""
    err = console(stderr=True)
    if not (live and err.is_terminal):
        yield _Quiet()
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=err, transient=True) as progress:
        yield _Live(progress)


def table(results: list[Json]) -> Table:
    """A line per bench, one per part of its mix below it, and one per rival beside it."""
    from rich.table import Table

    found = Table(show_edge=False, pad_edge=False)
    for heading in ("bench", "ours", "baseline", "ratio", "must reach", "spread", "content"):
        found.add_column(heading, justify="left" if heading in ("bench", "must reach", "content") else "right")
    for result in results:
        _add(found, result)
        for part in result.get("parts", ()):
            _add_part(found, part, result["unit"])
        for rival in result.get("rivals", ()):
            _add(found, rival, name=f"  beside {_short(rival['baseline'])}")
    return found


def notes(results: list[Json]) -> Iterator[str]:
    """What a reader must know besides: against what, how many, on which machine."""
    for result in results:
        others = [result["baseline"], *(rival["baseline"] for rival in result.get("rivals", ()))]
        yield f"{result['name']}: {result['rows']:,} rows, against {' and '.join(others)}"
        yield from result.get("notes", ())
    if results and results[0]["forced"]:
        yield f"forced: the load of the machine was {results[0]['load']} at the start"


def _add(found: Table, result: Json, name: str | None = None) -> None:
    from rich.text import Text

    verdict = Text("equal", "green") if result["equal"] else Text("NOT EQUAL", "bold red")
    must = Text(_must(result), "green" if result["reached"] else "yellow")
    unit = result["unit"]
    found.add_row(
        Text(name or result["name"], "bold" if name is None else ""),
        _figure(result["value"], unit),
        _figure(result["baseline_value"], unit),
        _number(result["ratio"]),
        must,
        "",
        verdict,
    )


def _add_part(found: Table, part: Json, unit: str) -> None:
    from rich.text import Text

    spread = f"{part['spread']:.0%} / {part['baseline_spread']:.0%}"
    values = (_figure(part["value"], unit), _figure(part["baseline_value"], unit), _number(part["ratio"]))
    found.add_row(*(Text(text, "dim") for text in (f"  {part['part']}", *values, "", spread, "")))


def _must(result: Json) -> str:
    must = result["must"]
    if must is None:
        return ""
    word = "reached" if result["reached"] else "not reached"
    return f"{must if isinstance(must, str) else _number(must)}, {word}"


def _short(baseline: str) -> str:
    return baseline.split(",")[0]


def _figure(value: Any, unit: str) -> str:
    return f"{value:,} {unit}"


def _number(value: Any) -> str:
    return f"{value:g}"
