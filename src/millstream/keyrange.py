"""A part of a table by its key, told by a condition that the source and every mirror answer alike.

    id >= 100 AND id < 200
    tenant = 'north' AND day BETWEEN '2026-01-01' AND '2026-01-31'
    id IN (3, 5) OR id > 1000

Comparisons of key columns with constants, joined by AND, OR, NOT and parentheses. Whole numbers, text, uuid, dates and
timestamps can be compared: text by its bytes (as COLLATE "C" does), the others as everywhere. A key is never NULL, so
each row is in the range or not. Databases without a type for dates have them as Postgres writes them, where texts of
the years 1 to 9999 are in the order of time; what lies outside is told by how it is written.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

Kind = Literal["integer", "text", "uuid", "time"]

_TOKEN = re.compile(
    r"""\s*(?:(?P<string>'(?:[^']|'')*')|(?P<quoted>"(?:[^"]|"")+")|(?P<number>[+-]?\d+(?:\.\d+)?)"""
    r"""|(?P<word>[^\W\d][\w$]*)|(?P<sign><=|>=|<>|!=|[=<>(),]))"""
)
_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "=", "<>": "<>"}
_WORDS = ("AND", "OR", "NOT", "BETWEEN", "IN")


class NotARange(ValueError):
    """The text is no condition of this kind; the message says where it ends to be one."""


@dataclass(frozen=True)
class Comparison:
    """A column compared with a constant, which is as somebody wrote it, or once it is bound, as the source does."""

    column: str
    op: str
    value: str


@dataclass(frozen=True)
class Joined:
    """Conditions of which all (AND) or any (OR) must hold."""

    word: Literal["AND", "OR"]
    parts: tuple[Condition, ...]


@dataclass(frozen=True)
class Negated:
    """A condition that must not hold."""

    part: Condition


Condition = Comparison | Joined | Negated


def parse(text: str) -> Condition:
    """The condition that a text says. Raises NotARange."""
    parser = _Parser(text)
    found = parser.any_of()
    parser.end()
    return found


def comparisons(condition: Condition) -> Iterator[Comparison]:
    """Every comparison of a condition, in its order."""
    if isinstance(condition, Comparison):
        yield condition
    else:
        for part in condition.parts if isinstance(condition, Joined) else (condition.part,):
            yield from comparisons(part)


def replaced(condition: Condition, change: Callable[[Comparison], Comparison]) -> Condition:
    """The condition with other comparisons."""
    if isinstance(condition, Comparison):
        return change(condition)
    if isinstance(condition, Negated):
        return Negated(replaced(condition.part, change))
    return Joined(condition.word, tuple(replaced(part, change) for part in condition.parts))


@dataclass(frozen=True)
class KeyColumn:
    """A column of a table's key."""

    source: str
    """Its name at the source,"""
    name: str
    """and at targets."""
    kind: Kind


@dataclass(frozen=True)
class Operand:
    """How a database's SQL says a key column."""

    text: str
    textual: bool = True
    """Whether dates and times are texts there."""
    indexed: str | None = None
    """How it says it so that an index on the column is of use where only equality is asked for."""


@dataclass(frozen=True)
class KeyRange:
    """A condition on columns of a table's key, whose constants are as the source writes such values. Picklable."""

    condition: Condition
    columns: tuple[KeyColumn, ...]

    def sql(self, operand: Callable[[KeyColumn], Operand]) -> str:
        """The condition for a database, in parentheses."""
        known = {column.source: column for column in self.columns}

        def said(condition: Condition) -> str:
            if isinstance(condition, Comparison):
                column = known[condition.column]
                return _compared(operand(column), column.kind, condition)
            if isinstance(condition, Negated):
                return f"(NOT {said(condition.part)})"
            return f"({f' {condition.word} '.join(map(said, condition.parts))})"

        return said(self.condition)

    def holds(self, key: Mapping[str, object]) -> bool:
        """Whether a row with this key (by the names at targets) is in the range."""
        names = [column.name for column in self.columns]
        values = ", ".join(f"? AS {_identifier(name)}" for name in names)
        condition = self.sql(lambda column: Operand(_identifier(column.name)))
        with closing(sqlite3.connect(":memory:")) as lite:
            ((found,),) = lite.execute(f"SELECT {condition} FROM (SELECT {values})", [key[name] for name in names])
        return bool(found)


def _compared(operand: Operand, kind: Kind, test: Comparison) -> str:
    column, op = operand.text, test.op
    value = test.value if kind == "integer" else _literal(test.value)
    if kind == "time" and operand.textual and op not in ("=", "<>"):
        # -infinity and years before Christ come before every constant, infinity and years from 10000 on after it.
        before, after = f"({column} LIKE '-%' OR {column} LIKE '%BC')", f"substr({column}, 5, 1) <> '-'"
        if op in ("<", "<="):
            return f"({before} OR (NOT ({after}) AND {column} {op} {value}))"
        return f"(NOT {before} AND ({after} OR {column} {op} {value}))"
    if op == "=" and operand.indexed is not None:
        return f"({operand.indexed} = {value} AND {column} = {value})"
    return f"{column} {op} {value}"


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        place = 0
        while text[place:].strip():
            found = _TOKEN.match(text, place)
            if found is None:
                raise NotARange(f"{text[place:].strip()[:20]!r} is not understood")
            assert found.lastgroup is not None  # noqa: S101 - each way has a name
            self._tokens.append((found.lastgroup, found[found.lastgroup]))
            place = found.end()
        self._at = 0

    def end(self) -> None:
        if self._at < len(self._tokens):
            raise self._unexpected()

    def any_of(self) -> Condition:
        return self._joined("OR", self._all_of)

    def _all_of(self) -> Condition:
        return self._joined("AND", self._one)

    def _joined(self, word: Literal["AND", "OR"], each: Callable[[], Condition]) -> Condition:
        parts = [each()]
        while self._takes(word):
            parts.append(each())
        return parts[0] if len(parts) == 1 else Joined(word, tuple(parts))

    def _one(self) -> Condition:
        if self._takes("NOT"):
            return Negated(self._one())
        if self._takes("("):
            found = self.any_of()
            self._expect(")")
            return found
        if self._kind() in ("number", "string"):
            value, op = self._constant(), self._op()
            return Comparison(self._column(), _FLIPPED[op], value)
        return self._of_column(self._column())

    def _of_column(self, column: str) -> Condition:
        negated = self._takes("NOT")
        found: Condition
        if self._takes("BETWEEN"):
            low = self._constant()
            self._expect("AND")
            found = Joined("AND", (Comparison(column, ">=", low), Comparison(column, "<=", self._constant())))
        elif self._takes("IN"):
            self._expect("(")
            values = [self._constant()]
            while self._takes(","):
                values.append(self._constant())
            self._expect(")")
            found = Joined("OR", tuple(Comparison(column, "=", value) for value in values))
        elif negated:
            raise self._unexpected()
        else:
            found = Comparison(column, self._op(), self._constant())
        return Negated(found) if negated else found

    def _column(self) -> str:
        kind, text = self._take("quoted", "word")
        if kind == "quoted":
            return text[1:-1].replace('""', '"')
        if text.upper() in _WORDS:
            self._at -= 1
            raise self._unexpected()
        return text.lower()

    def _constant(self) -> str:
        kind, text = self._take("number", "string")
        return text.removeprefix("+") if kind == "number" else text[1:-1].replace("''", "'")

    def _op(self) -> str:
        _, text = self._take("sign")
        op = "<>" if text == "!=" else text
        if op not in _FLIPPED:
            self._at -= 1
            raise self._unexpected()
        return op

    def _kind(self) -> str | None:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else None

    def _take(self, *kinds: str) -> tuple[str, str]:
        if self._kind() not in kinds:
            raise self._unexpected()
        self._at += 1
        return self._tokens[self._at - 1]

    def _takes(self, text: str) -> bool:
        """Whether this word or sign comes next; then it is behind us."""
        kind, found = self._tokens[self._at] if self._at < len(self._tokens) else ("", "")
        if kind not in ("word", "sign") or found.upper() != text:
            return False
        self._at += 1
        return True

    def _expect(self, text: str) -> None:
        if not self._takes(text):
            raise self._unexpected()

    def _unexpected(self) -> NotARange:
        if self._at >= len(self._tokens):
            return NotARange("it ends too early")
        return NotARange(f"{self._tokens[self._at][1]!r} is not expected there")
