"""The options of `format("millstream")`, read and checked. Knows neither Spark nor a journal."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from millstream.errors import ConfigError

T = TypeVar("T")
Choice = TypeVar("Choice", bound=enum.StrEnum)

EARLIEST = "earliest"

_STARTS = ("startingSeq", "startingPosition", "startingTimestamp")
_KNOWN = ("journal", "table", *_STARTS, "endingSeq", "maxEventsPerBatch", "schemaChange", "json")
_NAMES = {name.lower(): name for name in _KNOWN}


class SchemaChange(enum.StrEnum):
    """What becomes of changes whose table had other columns than the DataFrame has."""

    NULL = "null"
    """What a change did not have is NULL, what the DataFrame has no column for is left out."""
    FAIL = "fail"
    """They are an error that names the first of them."""


class Json(enum.StrEnum):
    """What columns of JSON are in the DataFrame."""

    STRING = "string"
    VARIANT = "variant"


@dataclass(frozen=True)
class FormatOptions:
    """Checked options. At most one of the starts is set; none means the earliest change there is."""

    journal: str
    table: str | None = None
    starting_seq: int | None = None
    """The first seq to read."""
    starting_position: str | None = None
    """In the source's own text form, which only the journal's source can read."""
    starting_timestamp_us: int | None = None
    ending_seq: int | None = None
    max_events: int | None = None
    schema_change: SchemaChange = SchemaChange.NULL
    json: Json = Json.STRING

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> FormatOptions:
        """Read Spark's options, whose names have no case. Raises ConfigError with everything that is wrong."""
        return _Parser(given).parse()


class _Parser:
    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = {name.lower(): value.strip() for name, value in given.items()}
        self._wrong: list[str] = []

    def parse(self) -> FormatOptions:
        journal = self._journal()
        self._refuse_unknown()
        self._refuse_starts()
        seq = self._value("startingSeq", _seq_or_earliest)
        options = FormatOptions(
            journal=journal,
            table=self._value("table", _text),
            starting_seq=seq or None,
            starting_position=self._value("startingPosition", _text),
            starting_timestamp_us=self._value("startingTimestamp", _timestamp),
            ending_seq=self._value("endingSeq", _count),
            max_events=self._value("maxEventsPerBatch", _count),
            schema_change=self._value("schemaChange", _choice(SchemaChange)) or SchemaChange.NULL,
            json=self._value("json", _choice(Json)) or Json.STRING,
        )
        if self._wrong:
            raise ConfigError(f"format millstream: {'; '.join(self._wrong)}", hint="docs/spark.md lists the options")
        return options

    def _journal(self) -> str:
        """`load(path)` says the same as the option `journal`."""
        path, journal = self._given.pop("path", None), self._given.get("journal")
        if path is not None and journal is not None:
            self._wrong.append("give the journal once, as the option `journal` or to load()")
        where = journal or path
        if not where:
            self._wrong.append("the option `journal` is missing: the journal's directory or URL")
            return ""
        # Tasks run elsewhere: what is relative to here must be said in full.
        return where if "://" in where else str(Path(where).absolute())

    def _refuse_unknown(self) -> None:
        for name in sorted(self._given.keys() - _NAMES.keys()):
            near = get_close_matches(name, _NAMES, n=1, cutoff=0.6)
            known = f"did you mean `{_NAMES[near[0]]}`?" if near else f"the options are {', '.join(_KNOWN)}"
            self._wrong.append(f"unknown option `{name}`: {known}")

    def _refuse_starts(self) -> None:
        starts = [name for name in _STARTS if name.lower() in self._given]
        if not starts:
            self._wrong.append(
                f"where to start is missing: one of {', '.join(_STARTS)}; startingSeq={EARLIEST} reads all there is"
            )
        if len(starts) > 1:
            self._wrong.append(f"{' and '.join(starts)} are given: choose one start")

    def _value(self, name: str, read: Callable[[str], T]) -> T | None:
        text = self._given.get(name.lower())
        if text is None:
            return None
        try:
            return read(text)
        except ValueError as wrong:
            self._wrong.append(f"option `{name}`: {wrong}")
            return None


def _text(text: str) -> str:
    if not text:
        raise ValueError("is empty")
    return text


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) < 1 << 63:
        raise ValueError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _seq_or_earliest(text: str) -> int:
    """The first seq to read; 0 stands for the earliest there is."""
    if text.lower() == EARLIEST:
        return 0
    try:
        return _count(text)
    except ValueError as wrong:
        raise ValueError(f"{wrong}, nor `{EARLIEST}`") from None


def _timestamp(text: str) -> int:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a time such as 2026-01-31T12:00:00Z") from None
    at = at.replace(tzinfo=UTC) if at.tzinfo is None else at
    return round(at.timestamp() * 1_000_000)


def _choice(choices: type[Choice]) -> Callable[[str], Choice]:
    def read(text: str) -> Choice:
        try:
            return choices(text.lower())
        except ValueError:
            raise ValueError(f"{text!r} is none of {', '.join(choices)}") from None

    return read
