"""The capture side of a scripted source."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from millstream.errors import ConfigError, SourceHalted, SourceUnavailable
from millstream.model import Json, Relation, SourceSpec
from millstream.observe import counted
from millstream.sources.base import CAPTURED, Block, Finding, Registrar, Severity, SourceIdentity
from millstream.sources.patterns import matcher
from millstream.sources.scripted.script import ID, KIND, Steps, slot_path

POLL = 0.02
"""Seconds between two looks at the script."""


class ScriptedSource:
    """Implements `sources.base.Source` over the directory of a `Script`."""

    kind = KIND

    def __init__(self, spec: SourceSpec) -> None:
        self._spec = spec
        self._path = directory(spec)
        self._slot = slot_path(self._path, spec.name)
        self._pause = threading.Event()

    def preflight(self) -> list[Finding]:
        try:
            found = self.relations(self._spec.tables)
        except SourceUnavailable as failed:
            return [Finding("script", Severity.ERROR, failed.message, failed.hint)]
        if not found:
            message = "the patterns in `tables` name no table of the script"
            return [Finding("tables", Severity.ERROR, message, "describe the table first: script.table(...)")]
        return [Finding("tables", Severity.OK, counted(len(found), "table"))]

    def relations(self, patterns: Sequence[str]) -> list[Relation]:
        self._script_id()
        wanted = matcher(patterns)
        tables: dict[str, Relation] = {}
        for step in Steps(self._path).since(0):
            if "table" in step:
                relation = Relation.from_json(step["table"])
                tables[relation.table] = relation
        return [relation for relation in tables.values() if wanted(relation)]

    def prepare(self) -> SourceIdentity:
        """A slot from here on, or the one that a start which was interrupted has left."""
        if not self._slot.exists():
            self._confirm(Steps(self._path).end)
        return SourceIdentity(KIND, {"script": self._script_id()}, self._confirmed())

    def check(self, identity: SourceIdentity, end: int) -> SourceIdentity:
        if identity.facts.get("script") != self._script_id():
            raise SourceHalted(f"the journal was filled from another script than {self._path}")
        if not self._slot.exists():
            raise SourceHalted(f"source {self._spec.name} has no slot at {self._path} any more")
        if self._confirmed() > end:
            raise SourceHalted(f"what lies between {end} and {self._confirmed()} was acknowledged, but not captured")
        if end > Steps(self._path).end:
            raise SourceHalted(f"the script ends before {end}: it is not the one that was captured")
        return identity

    def recall(self, descriptions: Sequence[Relation], end: int, look: Json | None = None) -> None:
        """A script says everything of its tables each time."""

    def capture(self, start: int, register: Registrar) -> Iterator[Block]:
        steps, player = Steps(self._path), _Player(self._spec, self._path, register)
        while True:
            came = False
            for step in steps.since(start):
                came = True
                yield from player.play(step, step["step"] * 2 + 2 > start)
            if not came:
                yield Block()
                self._pause.wait(POLL)

    def ack(self, position: int) -> None:
        if position > self._confirmed():
            self._confirm(position)

    def status(self) -> Json:
        confirmed = self._confirmed() if self._slot.exists() else 0
        return {"log_end": Steps(self._path).end, "confirmed": confirmed}

    def format_position(self, position: int) -> str:
        return str(position)

    def close(self) -> None:
        """Nothing is held."""

    def _script_id(self) -> str:
        try:
            return (self._path / ID).read_text()
        except OSError as missing:
            raise SourceUnavailable(f"there is no script at {self._path}: {missing.strerror}") from None

    def _confirmed(self) -> int:
        return int(json.loads(self._slot.read_text())["confirmed"])

    def _confirm(self, position: int) -> None:
        _replace(self._slot, json.dumps({"confirmed": position}))


class _Player:
    """Turns steps into blocks."""

    def __init__(self, spec: SourceSpec, path: Path, register: Registrar) -> None:
        self._path = path
        self._register = register
        self._wanted = matcher(spec.tables)
        self._tables: dict[str, Relation] = {}
        self._pause = threading.Event()

    def play(self, step: Json, new: bool) -> Iterator[Block]:
        """One step. Those that are not `new` were captured before; only their descriptions count."""
        end = step["step"] * 2 + 2
        if "table" in step:
            relation = Relation.from_json(step["table"])
            self._tables[relation.table] = relation
        if not new:
            return
        if "delay" in step:
            for _ in range(round(step["delay"] / POLL)):
                yield Block()
                self._pause.wait(POLL)
        if "halt" in step:
            raise SourceHalted(step["halt"])
        if "error" in step:
            self._fail(step)
        rows = self._rows(step, end) if "changes" in step else None
        yield Block(rows, progress=end) if rows is None else Block(rows)

    def _fail(self, step: Json) -> None:
        counter = self._path / f"failed-{step['step']}"
        before = int(counter.read_text()) if counter.exists() else 0
        if before < step["times"]:
            _replace(counter, str(before + 1))
            raise SourceUnavailable(step["error"])

    def _rows(self, step: Json, end: int) -> pa.RecordBatch | None:
        """The changes of a transaction that belong to the source's tables; None if none does."""
        chosen = [
            (change, 0 if change["table"] is None else self._register(self._tables[change["table"]]))
            for change in step["changes"]
            if change["table"] is None or self._wanted(self._tables[change["table"]])
        ]
        if not chosen:
            return None
        count = len(chosen)
        at = datetime.fromisoformat(step["at"])
        payloads = [json.dumps({"after": change["after"], "before": change["before"]}).encode() for change, _ in chosen]
        columns = [
            range(count),
            [ord(change["op"]) for change, _ in chosen],
            [end - 1] * count,
            [end] * count,
            [at] * count,
            [step["step"]] * count,
            [relation for _, relation in chosen],
            payloads,
        ]
        arrays = [pa.array(list(values), field.type) for values, field in zip(columns, CAPTURED, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=CAPTURED)


def directory(spec: SourceSpec) -> Path:
    """Where the script is. Raises ConfigError."""
    parts = urlsplit(spec.uri)
    if parts.scheme != "file" or not parts.path:
        raise ConfigError(f"source {spec.name}: not the URI of a script", hint="use script.source(...)")
    return Path(unquote(parts.path))


def remove(spec: SourceSpec) -> None:
    """Drop the slot. Idempotent."""
    slot_path(directory(spec), spec.name).unlink(missing_ok=True)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)
