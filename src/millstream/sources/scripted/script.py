"""A script: the "database" of a scripted source, a directory that the test writes and capture reads.

    DIRECTORY/
      id                  which script this is
      log.jsonl           one step a line, only ever appended
      slot-NAME.json      what a source of that name has confirmed
      failed-STEP         how often an error was raised

A step is a description of a table, a transaction, a delay or an error. The step on line n (from 0)
has the commit position 2n + 1 and ends at 2n + 2: positions grow, and both kinds differ.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from millstream.errors import ConfigError
from millstream.model import AckPolicy, Column, Json, Relation, SourceSpec

KIND = "scripted"
TYPES = ("integer", "text", "boolean", "float", "timestamp")
LOG, ID = "log.jsonl", "id"


class Script:
    """What a scripted source does, step by step. One process writes it; any number of threads.

    A step is durable, and can be captured, when the call returns.
    """

    def __init__(self, directory: Path | str) -> None:
        """Begin a script in this directory, or go on with the one that is there."""
        self.path = Path(directory).absolute()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._tables: dict[str, Relation] = {}
        if not (self.path / ID).exists():
            (self.path / ID).write_text(uuid.uuid4().hex)
        for step in Steps(self.path).since(0):
            if "table" in step:
                relation = Relation.from_json(step["table"])
                self._tables[relation.table] = relation

    def source(
        self, name: str, tables: Sequence[str] = ("*.*",), *, ack: AckPolicy = AckPolicy.DELIVERED
    ) -> SourceSpec:
        """The source that plays this script, for a `StreamSpec`."""
        return SourceSpec(name, KIND, self.path.as_uri(), None, tuple(tables), ack=ack)

    def table(self, name: str, columns: Mapping[str, str], key: Sequence[str] = ()) -> None:
        """Describe a table, `schema.table`; said again, its columns change. Types: integer, text, boolean, float,
        timestamp."""
        schema, dot, bare = name.partition(".")
        wrong = [kind for kind in columns.values() if kind not in TYPES] + [one for one in key if one not in columns]
        if not dot or wrong:
            what = f"no type or key of a scripted table: {wrong[0]}" if wrong else f"{name!r} is no schema.table"
            raise ConfigError(what, hint=f"types are {', '.join(TYPES)}")
        known = self._tables.get(name)
        described = tuple(Column(column, 0, key=column in key, type_name=kind) for column, kind in columns.items())
        oid = known.oid if known else len(self._tables) + 1
        identity = "d" if key else "n"
        relation = Relation(oid, schema, bare, identity, described, tuple(key), tuple(key), True, KIND)
        self._tables[name] = relation
        self._append({"table": relation.to_json()})

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Changes that are committed together when the block ends, and forgotten if it raises."""
        changes = Transaction(self._tables)
        yield changes
        self._append({"changes": changes.steps, "at": datetime.now(UTC).isoformat()})

    def insert(self, table: str, **row: Any) -> None:
        """One insert, in a transaction of its own."""
        with self.transaction() as changes:
            changes.insert(table, **row)

    def delay(self, seconds: float) -> None:
        """Let capture stand still when it comes here."""
        self._append({"delay": seconds})

    def fail(self, message: str, times: int = 1) -> None:
        """Lose the connection when capture comes here, so many times in a row; then go on."""
        self._append({"error": message, "times": times})

    def halt(self, message: str) -> None:
        """Refuse to go on when capture comes here, for ever."""
        self._append({"halt": message})

    def confirmed(self, source: str) -> int | None:
        """What the source of this name was acknowledged last; None if none captures this script."""
        path = slot_path(self.path, source)
        return int(json.loads(path.read_text())["confirmed"]) if path.exists() else None

    @property
    def end(self) -> int:
        """The position after the last step."""
        return Steps(self.path).end

    def _append(self, step: Json) -> None:
        with self._lock, (self.path / LOG).open("ab") as file:
            file.write(json.dumps(step, default=datetime.isoformat).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


class Transaction:
    """Changes that belong together, in their order."""

    def __init__(self, tables: Mapping[str, Relation]) -> None:
        self._tables = tables
        self.steps: list[Json] = []

    def insert(self, table: str, **row: Any) -> None:
        self._change("c", table, after=row)

    def update(self, table: str, row: Mapping[str, Any], *, before: Mapping[str, Any] | None = None) -> None:
        """The new row; columns that it leaves out did not change and are not sent. `before` is the old row, or its
        key, if the source sends one."""
        self._change("u", table, after=row, before=before)

    def delete(self, table: str, **key: Any) -> None:
        self._change("d", table, after=key, before=key)

    def truncate(self, table: str) -> None:
        self._change("t", table, after={})

    def message(self, prefix: str, content: str) -> None:
        """A message that belongs to no table."""
        self.steps.append({"op": "m", "table": None, "after": {"prefix": prefix, "content": content}, "before": None})

    def _change(
        self, op: str, table: str, *, after: Mapping[str, Any], before: Mapping[str, Any] | None = None
    ) -> None:
        relation = self._tables.get(table)
        if relation is None:
            raise ConfigError(f"the script has no table {table}", hint="describe it first: script.table(...)")
        names = {column.name for column in relation.columns}
        strange = [name for name in (*after, *(before or {})) if name not in names]
        missing = [name for name in names if op == "c" and name not in after]
        if strange or missing:
            what = f"has no column {strange[0]}" if strange else f"needs a value for {missing[0]}"
            raise ConfigError(f"table {table} {what}")
        self.steps.append({"op": op, "table": table, "after": dict(after), "before": before and dict(before)})


class Steps:
    """The steps of a script as capture reads them: whole lines only."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOG
        self._offset = 0
        self._count = 0

    @property
    def end(self) -> int:
        """The position after the last step that is there now."""
        try:
            return 2 * self._path.read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def since(self, position: int) -> Iterator[Json]:
        """The steps that are new since the last call and end after `position`, each with its number as `step`."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return
        for line in new[: new.rfind(b"\n") + 1].splitlines(keepends=True):
            self._offset += len(line)
            self._count += 1
            step = json.loads(line)
            if 2 * self._count > position or "table" in step:
                yield {**step, "step": self._count - 1}


def slot_path(directory: Path, source: str) -> Path:
    return directory / f"slot-{source}.json"
