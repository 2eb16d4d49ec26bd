"""Copying tables anew: what is asked, whether it can be, and writing it down. `engine.reloading` does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from millstream.engine.fit import open_target
from millstream.errors import ConfigError, NotReady, NotSupported
from millstream.failpoint import failpoint
from millstream.model import Json, Mode, StreamSpec
from millstream.sources import can_copy
from millstream.sources.postgres.patterns import parse_patterns
from millstream.state.base import StateStore
from millstream.targets.base import Reloadable, Target

WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"
UNFINISHED = (WAITING, RUNNING)
RELOAD = "reload"
"""The kind of note in which the state store has a target's last reload."""


@dataclass(frozen=True)
class AskedTables:
    """Which tables are to be copied anew: those of these names (`schema.table`) and patterns; all, if there is none."""

    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    """Patterns of tables that are not meant, though one of `patterns` names them."""

    @property
    def all(self) -> bool:
        return not (self.names or self.patterns)

    def to_json(self) -> Json:
        return {name: list(value) for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> AskedTables:
        return cls(*(tuple(value[name]) for name in ("names", "patterns", "excluded")))


def waiting(asked: AskedTables, before: Json | None = None) -> Json:
    """A reload as it is written down. What was asked `before`, and has not ended, goes with it.

    `resolved`: whether the source was asked which tables these are, and `tables` has them.
    """
    names, patterns, excluded, whole = list(asked.names), list(asked.patterns), list(asked.excluded), asked.all
    tables: Json = {}
    if before is not None and before["state"] in UNFINISHED:
        # What the first one meant by its patterns is not done yet, and none of it is to be left out.
        excluded = before["excluded"] if before["patterns"] else excluded
        names, patterns = [*before["names"], *names], [*before["patterns"], *patterns]
        whole = whole or before["all"]
        tables = {} if asked.all or asked.patterns else before["tables"]
    return {
        "state": WAITING,
        "all": whole,
        "names": list(dict.fromkeys(names)),
        "patterns": list(dict.fromkeys(patterns)),
        "excluded": excluded,
        "tables": {name: one for name, one in tables.items() if name not in asked.names},
        "resolved": False,
        "asked_at": datetime.now(UTC).isoformat(),
        "finished_at": None,
    }


def table_waiting() -> Json:
    """How one table of a reload is before anything was done. `seq` is the version that its rows get."""
    return {"state": WAITING, "chunks": None, "done": 0, "rows": 0, "seq": None, "tries": 0, "error": None}


def can_reload(target: Target) -> bool:
    """Whether tables can be copied anew to a target; connects to nothing."""
    return isinstance(target, Reloadable) and target.reloads


def ask_for_added(store: StateStore, stream: StreamSpec, before: Json) -> None:
    """Have targets that are there already get the rows of tables that the stream did not have `before`."""
    known = tuple(before["source"]["tables"])
    added = tuple(pattern for pattern in stream.source.tables if pattern not in known)
    if stream.mode is not Mode.SNAPSHOT_THEN_CDC or not added:
        return
    for spec in stream.targets:
        if store.get_cursor(stream.name, spec.name) is not None and can_reload(open_target(spec)):
            asked = AskedTables(patterns=added, excluded=known)
            record = waiting(asked, store.notes(stream.name, RELOAD).get(spec.name))
            store.save_note(stream.name, spec.name, RELOAD, record)


class Reload:
    """Of tables of a stream at some of its targets. `check` changes nothing."""

    def __init__(self, store: StateStore, stream: StreamSpec, targets: Sequence[str], asked: AskedTables) -> None:
        self._store = store
        self._stream = stream
        self._specs = [spec for spec in stream.targets if spec.name in targets]
        self._asked = asked

    def check(self) -> None:
        """Raise NotSupported, NotReady or ConfigError before anything is changed."""
        if self._stream.mode is Mode.SNAPSHOT:
            raise NotSupported(
                f"stream {self._stream.name} has mode snapshot: its targets get one copy, and no changes",
                hint="give it a new target for another copy",
            )
        can_copy(self._stream.source)
        self._check_names()
        lost = self._store.needs_reload(self._stream.name)
        for spec in self._specs:
            what = f"target {spec.name} of stream {self._stream.name}"
            if not can_reload(open_target(spec)):
                raise NotSupported(
                    f"{what} cannot get a table anew: it keeps versions that only changes tell",
                    hint="reload another target (--target), or begin a new one",
                )
            if spec.name in lost:
                raise NotReady(
                    f"{what} has lost changes of all its tables, and cannot go on from where it is",
                    hint="give the stream a new target (another name, an empty place), which begins with all rows",
                )
            if self._store.get_cursor(self._stream.name, spec.name) is None:
                raise NotReady(f"{what} has got nothing yet", hint="reload it when it has")

    def _check_names(self) -> None:
        patterns = parse_patterns(self._stream.source.tables)
        for name in self._asked.names:
            schema, _, table = name.partition(".")
            if not any(pattern.matches(schema, table) for pattern in patterns):
                raise ConfigError(
                    f"stream {self._stream.name} has no table {name}",
                    hint=f"write schema.table; its tables are {', '.join(self._stream.source.tables)}",
                )

    def run(self) -> None:
        """Write down what is to be copied. What was asked before, and has not ended, is done too."""
        for spec in self._specs:
            before = self._store.notes(self._stream.name, RELOAD).get(spec.name)
            self._store.save_note(self._stream.name, spec.name, RELOAD, waiting(self._asked, before))
            failpoint("reload.asked")
