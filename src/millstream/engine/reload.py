"""Copying tables anew: what is asked, whether it can be, and writing it down. `engine.reloading` does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any

from millstream.engine.fit import open_target
from millstream.engine.unknown import is_for, refuse_unknown_tables
from millstream.errors import ConfigError, NotReady, NotSupported, SecretError, SourceError, UnknownName
from millstream.failpoint import failpoint
from millstream.model import Json, Mode, StreamSpec
from millstream.sources import can_copy, captured_tables, key_range
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
    where: str | None = None
    """Which range of its key is meant, of the one table that is named; None: all of it."""

    @property
    def all(self) -> bool:
        return not (self.names or self.patterns)

    def to_json(self) -> Json:
        lists = {name: list(value) for name, value in vars(self).items() if name != "where"}
        return {**lists, "where": self.where}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> AskedTables:
        names, patterns, excluded = (tuple(value[name]) for name in ("names", "patterns", "excluded"))
        return cls(names, patterns, excluded, value["where"])


def waiting(asked: AskedTables, before: Json | None = None, *, lost: bool = False) -> Json:
    """A reload as it is written down. What was asked `before`, and has not ended, goes with it.

    `resolved`: whether the source was asked which tables these are, and `tables` has them. `lost`: the target lacks
    changes that the journal does not have any more, and goes on without them.
    """
    names, patterns, excluded, whole = list(asked.names), list(asked.patterns), list(asked.excluded), asked.all
    tables: Json = {}
    where = dict.fromkeys(asked.names, asked.where) if asked.where is not None else {}
    if before is not None and before["state"] in UNFINISHED:
        where, lost = _ranges(asked, before), lost or before.get("lost", False)
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
        "where": where,
        "tables": {name: one for name, one in tables.items() if name not in asked.names},
        "resolved": False,
        "lost": lost,
        "baseline": bool(before and before["state"] in UNFINISHED and before.get("baseline")),
        "asked_at": datetime.now(UTC).isoformat(),
        "finished_at": None,
    }


def _ranges(asked: AskedTables, before: Json) -> Json:
    """By table the range that is to be copied of it when a reload before has not ended: what either of them means."""
    ranges: Json = {} if asked.all or asked.patterns else dict(before.get("where", {}))
    for name in asked.names:
        done = before["tables"].get(name, {}).get("state") not in (None, *UNFINISHED)
        mentioned = before["all"] or before["patterns"] or name in before["names"]
        if asked.where is None or (mentioned and not done and name not in ranges):
            ranges.pop(name, None)
        elif done or name not in ranges:
            ranges[name] = asked.where
        elif asked.where != ranges[name]:
            ranges[name] = f"({ranges[name]}) OR ({asked.where})"
    return ranges


def table_waiting(where: str | None = None) -> Json:
    """How one table of a reload is before anything was done. `where`: the range of its key that is copied; None: all.

    `seq` is the version that its rows get now; `points` are all there were: `from` which chunk on rows have the version
    `seq` and were read at `position`. Rate and time are those of the process at hand.
    """
    begun: Json = {
        "state": WAITING,
        "chunks": None,
        "done": 0,
        "rows": 0,
        "seq": None,
        "points": [],
        "rows_per_second": None,
        "seconds_left": None,
        "tries": 0,
        "error": None,
    }
    return begun if where is None else {**begun, "where": where}


def given_up(store: StateStore, stream: str) -> set[str]:
    """The targets of a stream that have lost changes, and that nobody has asked to get all tables anew."""
    notes = store.notes(stream, RELOAD)

    def is_asked(target: str) -> bool:
        note = notes.get(target, {})
        return note.get("state") in UNFINISHED and bool(note.get("lost"))

    return {target for target in store.needs_reload(stream) if not is_asked(target)}


def progress_of(record: Json) -> Json | None:
    """How far the tables of an unfinished reload are together; None of another one."""
    tables = list(record["tables"].values())
    if record["state"] not in UNFINISHED:
        return None
    running = next((one for one in tables if one["state"] == RUNNING), table_waiting())
    return {
        "tables": len(tables),
        "tables_done": sum(one["state"] == DONE for one in tables),
        "chunks": running["chunks"],
        "done": running["done"],
        "rows": sum(one["rows"] for one in tables),
        "rows_per_second": running["rows_per_second"],
        "seconds_left": running["seconds_left"],
    }


def is_copying(record: Json | None, names: Sequence[str] = ()) -> bool:
    """Whether one of these tables (none: of all) is still to be copied, by what is written down of a target."""
    if record is None or record["state"] not in UNFINISHED:
        return False
    if not names or not record["resolved"]:
        return True
    return any(record["tables"].get(name, {}).get("state") in UNFINISHED for name in names)


def can_reload(target: Target) -> bool:
    """Whether tables can be copied anew to a target; connects to nothing."""
    return isinstance(target, Reloadable)


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
        refuse_unknown_tables(self._stream, self._asked.names)
        lost = self._store.needs_reload(self._stream.name)
        for spec in self._specs:
            what = f"target {spec.name} of stream {self._stream.name}"
            if not can_reload(open_target(spec)):
                raise NotSupported(
                    f"{what} cannot get a table anew: a target of kind {spec.kind} has no tables",
                    hint="reload another target (--target)",
                )
            if spec.name in lost and not self._asked.all:
                raise NotReady(
                    f"{what} has lost changes of all its tables, and would go on without those of the others",
                    hint=f"reload all of them: millstream reload {self._stream.name} --target {spec.name}",
                )
            if self._store.get_cursor(self._stream.name, spec.name) is None:
                raise NotReady(f"{what} has got nothing yet", hint="reload it when it has")
        self._check_there()
        if self._asked.where is not None:
            self._check_range(self._asked.where)

    def _check_there(self) -> None:
        """Raise UnknownName for a table that a pattern means and the source does not have. One that is away is asked
        later."""
        if not self._asked.names:
            return
        with suppress(SourceError, SecretError):
            there = captured_tables(self._stream.source)
            for name in self._asked.names:
                if name not in there:
                    near = get_close_matches(name, there, 1)
                    raise UnknownName(
                        f"stream {self._stream.name} has no table {name}: its source has none of this name, or "
                        "captures it under another one",
                        hint=f"did you mean {near[0]}?" if near else "write schema.table, as the source has it",
                    )

    def _check_range(self, where: str) -> None:
        """Raise unless every target can get a range of the one table anew. A source that is away is asked later."""
        if len(self._asked.names) != 1:
            raise ConfigError(
                f"where is a condition on the key of one table, and {len(self._asked.names) or 'no'} tables are named",
                hint="name the table (--table), and reload others by themselves",
            )
        (name,) = self._asked.names
        for spec in self._specs:
            target = open_target(spec)
            if not (isinstance(target, Reloadable) and target.reloads_by_steps):
                raise NotSupported(
                    f"target {spec.name} of stream {self._stream.name} keeps what has happened, of which no part can "
                    "be replaced",
                    hint="reload the whole table there (without where), or name another target (--target)",
                )
        if any(is_for(step.tables, name) for step in self._stream.shape.transforms):
            raise NotSupported(
                f"stream {self._stream.name} transforms {name}: a range of the source's key need not be one of the "
                "target's rows",
                hint="reload the whole table (without where)",
            )
        with suppress(SourceError, SecretError):
            key_range(self._stream.source, name, where)

    def run(self) -> None:
        """Write down what is to be copied. What was asked before, and has not ended, is done too."""
        lost = self._store.needs_reload(self._stream.name)
        for spec in self._specs:
            before = self._store.notes(self._stream.name, RELOAD).get(spec.name)
            record = waiting(self._asked, before, lost=spec.name in lost)
            self._store.save_note(self._stream.name, spec.name, RELOAD, record)
            failpoint("reload.asked")
