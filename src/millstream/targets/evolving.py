"""A mirror's columns follow the source's: by the numbers that the catalog gives columns for good, not by their names.

A target keeps beside each column the number of the source's (`table.column`). So a column that has another name
now is renamed with its values, and one that took the name of a column that is gone does not inherit its values.
Where a number is not known, of a target made before or of a description that the catalog could not complete, the
name decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from millstream.changelog import exposed
from millstream.errors import TargetRefused
from millstream.model import Relation


@dataclass(frozen=True)
class Evolution:
    """What has to happen to a mirror's columns before new ones are added. Names that change places are in `renamed`."""

    renamed: Mapping[str, str]
    dropped: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.renamed or self.dropped)

    def without(self, more: Collection[str]) -> Evolution:
        """The same, and these columns dropped as well."""
        return Evolution(self.renamed, tuple(dict.fromkeys([*self.dropped, *more])))


def numbers(relation: Relation) -> dict[str, str]:
    """The source's columns by number, with the names that a target's have."""
    return {
        f"{relation.oid}.{column.attnum}": column.name
        for column in exposed(relation).columns
        if column.attnum is not None
    }


def evolution(
    table: str,
    known: Mapping[str, str],
    wanted: Mapping[str, str],
    there: Collection[str],
    plain: Callable[[str], str] = str,
) -> Evolution:
    """From what a mirror has (`known`: number to name, `there`: all names) to what it should have (`wanted`).

    `plain` gives names that the target does not tell apart the same form. Raises TargetRefused if a name is taken
    by a column of which nothing is known.
    """
    names = {plain(name): name for name in there}
    holders = {plain(name): number for number, name in known.items() if plain(name) in names}
    renamed, dropped = {}, []
    for number, name in wanted.items():
        old = known.get(number)
        moves = old is not None and plain(old) != plain(name) and plain(old) in names
        holder = holders.get(plain(name))
        if holder is not None and holder != number and holder not in wanted:
            # Another table's numbers say nothing: it was restored, or replaced.
            if holder.partition(".")[0] == number.partition(".")[0]:
                dropped.append(names[plain(name)])
            elif moves:
                raise _taken(table, name)
        elif holder is None and moves and plain(name) in names:
            raise _taken(table, name)
        if moves and old is not None:
            renamed[names[plain(old)]] = name
    return Evolution(renamed, tuple(dropped))


def gone(
    known: Mapping[str, str], wanted: Mapping[str, str], there: Collection[str], plain: Callable[[str], str] = str
) -> tuple[str, ...]:
    """The columns that the source had and has no more. None of a description that does not tell every number."""
    tables, names = {number.partition(".")[0] for number in wanted}, {plain(name): name for name in there}
    return tuple(
        names[plain(name)]
        for number, name in known.items()
        if number not in wanted and number.partition(".")[0] in tables and plain(name) in names
    )


def renamed_since(table: str) -> TargetRefused:
    """For a change that comes late."""
    return TargetRefused(
        f"{table}: columns have other names now, or types, than when this change was made",
        hint="bring the row with `millstream verify --repair`, and purge the letter",
    )


def _taken(table: str, name: str) -> TargetRefused:
    return TargetRefused(
        f"{table}: a column is called {name} at the source now, and the target has another one of that name",
        hint="rename or drop that one; delivery goes on when the stream is started again",
    )
