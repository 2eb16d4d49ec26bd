"""Results in columns. A narrow terminal gets fewer columns, never a value that is cut: an id must be one to copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING

from millstream.cli.output import console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

GAP = 2
"""Blanks between two columns."""

LEAST_WORDS = 24
"""A last column of words is broken into lines if it has this much room; otherwise the terminal breaks them."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `spare` 0 is always shown; of the others the highest goes first where there is no room."""

    name: str
    right: bool = False
    spare: int = 0


def print_columns(
    columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], *, indent: int = 0, out: Console | None = None
) -> None:
    """Print `rows` under the names of `columns`, and what was left out for want of room. Pipes and files get all."""
    out = out or console()
    width = out.width - indent if out.is_terminal else None
    shown = _that_fit(columns, rows, width)
    for line in _lines([columns[at] for at in shown], [[row[at] for at in shown] for row in rows], width):
        line.pad_left(indent)
        line.rstrip()
        out.print(line)
    left_out = [column.name for at, column in enumerate(columns) if at not in shown]
    if left_out:
        text = f"(no room for {', '.join(left_out)}: see --json, or a wider terminal)"
        out.print(f"{' ' * indent}{text}", style="dim")


def _that_fit(columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], width: int | None) -> list[int]:
    """Which columns there is room for; the last one, of words, needs only some."""
    shown = list(range(len(columns)))
    widths = [_width(column, rows, at) for at, column in enumerate(columns)]
    if not columns[-1].right:
        widths[-1] = min(widths[-1], LEAST_WORDS)
    while width is not None and sum(widths[at] for at in shown) + GAP * (len(shown) - 1) > width:
        spare = max(shown, key=lambda at: columns[at].spare)
        if not columns[spare].spare:
            break
        shown.remove(spare)
    return shown


def _width(column: Column, rows: Sequence[Sequence[str | Text]], at: int) -> int:
    from rich.cells import cell_len

    return max([cell_len(column.name), *(cell_len(str(row[at])) for row in rows)])


def _lines(columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], width: int | None) -> list[Text]:
    from rich.text import Text

    widths = [_width(column, rows, at) for at, column in enumerate(columns)]
    before = sum(widths[:-1]) + GAP * (len(widths) - 1)
    room = width - before if width is not None and not columns[-1].right else None
    lines = [_line([Text(column.name, "bold") for column in columns], columns, widths)]
    for row in rows:
        cells = [cell if isinstance(cell, Text) else Text(cell) for cell in row]
        parts = wrap(cells[-1].plain, room) if room is not None and LEAST_WORDS <= room < len(cells[-1]) else []
        lines.append(_line([*cells[:-1], Text(parts[0])] if parts else cells, columns, widths))
        lines += [Text(" " * before + part) for part in parts[1:]]
    return lines


def _line(cells: Sequence[Text], columns: Sequence[Column], widths: Sequence[int]) -> Text:
    from rich.text import Text

    line = Text()
    for cell, column, width in zip(cells, columns, widths, strict=True):
        blanks = " " * (width - cell.cell_len)
        line.append_text(Text(blanks) + cell if column.right else cell + Text(blanks))
        line.append(" " * GAP)
    return line
