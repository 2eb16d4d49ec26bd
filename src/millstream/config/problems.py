"""What is wrong with a stream file: where, what, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from millstream.errors import ConfigError
from millstream.model import Json


@dataclass(frozen=True)
class Problem:
    """One thing to put right. Lines and columns count from 1; None when the file could not be read."""

    file: str
    line: int | None
    column: int | None
    key: str
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}:{self.column}"
        key = f" {self.key}:" if self.key else ""
        return f"{place}:{key} {self.message}" + (f"; {self.hint}" if self.hint else "")

    def to_json(self) -> Json:
        return {
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "key": self.key,
            "message": self.message,
            "hint": self.hint,
        }


class StreamFileError(ConfigError):
    """Stream files with problems: all of them, one a line in the message, as values in `problems`."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        count = f"{len(self.problems)} problems" if len(self.problems) > 1 else "a problem"
        super().__init__("\n".join([f"{count} in the stream file", *(f"  {problem}" for problem in self.problems)]))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.problems,)


def in_order(problems: Sequence[Problem]) -> list[Problem]:
    """By file (as they were read) and place.

    Where YAML itself was wrong, or a variable is not set, that is the reason for whatever validation
    says of the same value, which is therefore left out.
    """
    files = list(dict.fromkeys(problem.file for problem in problems))
    reasons = {(problem.file, problem.line, problem.column) for problem in problems if not problem.key}
    kept = [one for one in problems if not one.key or (one.file, one.line, one.column) not in reasons]
    return sorted(kept, key=lambda one: (files.index(one.file), one.line or 0, one.column or 0))


class Refusal(ValueError):
    """A value that cannot be taken, with what to do instead. Validators raise it."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def nearest(word: str, known: Iterable[str]) -> str | None:
    """`did you mean ...?` for a misspelt word, None when nothing is near."""
    found = get_close_matches(word.lower(), sorted(known), n=1, cutoff=0.6)
    return f"did you mean `{found[0]}`?" if found else None
