"""Delivering once more what targets have had: what is asked, whether it can be, and writing it down.

There are two ways. A target that can take its last batches back (`files`, when all of them are to come again) goes back
to the end of an earlier batch; delivery sees that it is behind its saved cursor, and begins a new epoch there.
Otherwise a target stays where it is: the replay is written down, and the delivery runs it before it goes on
(`engine.replaying`). The changes come from the journal either way: the source is not asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from millstream.engine.fit import open_target
from millstream.engine.home import Home
from millstream.errors import ConfigError, NotReady, NotSupported, OutOfRange, UnknownName
from millstream.failpoint import failpoint
from millstream.journal import JournalReader
from millstream.model import Checkpoint, Json, Mode, SeqRange, StreamSpec
from millstream.names import instead
from millstream.sources.patterns import matcher
from millstream.sources.positions import parse_position
from millstream.state.base import StateStore
from millstream.targets.base import Rebatching, Replayable, Rewinding, Target, TargetCursor

Place = Checkpoint | datetime | int | str
"""After a checkpoint; from a commit time on; from the change with a seq on; from a position of the source on (text)."""

WAITING, RUNNING, REWOUND, DONE, FAILED = "waiting", "running", "rewound", "done", "failed"
UNFINISHED = (WAITING, RUNNING)


@dataclass(frozen=True)
class Asked:
    """What is to be delivered once more. `until` is where it ends; None: where each target is."""

    start: Place
    until: datetime | int | str | None = None
    tables: tuple[str, ...] = ()

    def to_json(self) -> Json:
        until = None if self.until is None else _said(self.until)
        return {"start": _said(self.start), "until": until, "tables": list(self.tables)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Asked:
        until = None if value["until"] is None else _meant(value["until"])
        assert not isinstance(until, Checkpoint)  # noqa: S101 - nobody says so
        return cls(_meant(value["start"]), until, tuple(value["tables"]))


def _said(place: Place) -> Json:
    if isinstance(place, Checkpoint):
        return {"checkpoint": place.to_json()}
    if isinstance(place, datetime):
        return {"time": place.isoformat()}
    return {"seq" if isinstance(place, int) else "position": place}


def _meant(value: Mapping[str, Any]) -> Place:
    ((kind, said),) = value.items()
    if kind == "checkpoint":
        return Checkpoint.from_json(said)
    if kind == "time":
        return datetime.fromisoformat(said)
    return int(said) if kind == "seq" else str(said)


def waiting(start: int, until: int, tables: Sequence[str] = (), *, newest_first: bool) -> Json:
    """A replay of the changes with start < seq <= until, as it is written down.

    `done_seq` is up to where, or newest first down to where, it is done; `epoch` marks it once it has begun.
    """
    return {
        "state": WAITING,
        "from_seq": start,
        "until_seq": until,
        "done_seq": None,
        "events": 0,
        "tables": list(tables),
        "newest_first": newest_first,
        "epoch": None,
        "asked_at": datetime.now(UTC).isoformat(),
        "finished_at": None,
        "error": None,
    }


class Replay:
    """Of some targets of a stream. `check` changes nothing; `run` may only be called while none of them delivers."""

    def __init__(self, home: Home, store: StateStore, stream: StreamSpec, targets: Sequence[str], asked: Asked) -> None:
        self._store = store
        self._stream = stream
        self._asked = asked
        self._reader = JournalReader([str(home.journal_path(stream.source.name))])
        self._targets = {spec.name: open_target(spec) for spec in stream.targets if spec.name in targets}
        self.seq = 0
        """Changes after this one come again."""
        self._until: int | None = None

    def check(self) -> None:
        """Raise NotSupported, NotReady, ConfigError or OutOfRange before anything is changed."""
        if self._stream.mode is Mode.SNAPSHOT:
            raise NotSupported(
                f"stream {self._stream.name} has mode snapshot: there are no changes to deliver once more",
                hint="give it a new target for another copy",
            )
        self._check_tables()
        for name, target in self._targets.items():
            self._check_target(name, target)
        try:
            self.seq = self._start()
        except OutOfRange as gone:
            # What lies beyond the journal's end has no hint: it can only be waited for.
            raise OutOfRange(gone.message, hint=self._instead() if gone.hint else None) from None
        if self._asked.until is not None:
            self._until = self._end(self._asked.until)
            if self._until <= self.seq:
                raise ConfigError("nothing lies between the beginning and the end of this replay")
        for name, target in self._targets.items():
            if self._rewinds(target):
                assert isinstance(target, Rewinding)  # noqa: S101 - just seen
                self._check_place(name, target.rewind(self._stream.name, name, self.seq, look_only=True))
            else:
                self._check_retained(self._covered(name, target).start)

    def run(self) -> None:
        """Take batches back, or write down what is to come again. Killed in between, the rest is not replayed."""
        for name, target in self._targets.items():
            span = self._covered(name, target)
            newest_first = isinstance(target, Replayable) and target.mirrors
            record = waiting(span.start, span.end, self._asked.tables, newest_first=newest_first)
            if self._rewinds(target):
                assert isinstance(target, Rewinding)  # noqa: S101 - `check` has looked
                place = target.rewind(self._stream.name, name, self.seq)
                record |= {"state": REWOUND, "from_seq": place.seq if place else 0}
            self._store.save_replay(self._stream.name, name, record)
            failpoint("engine.replay_saved")

    def _covered(self, name: str, target: Target) -> SeqRange:
        """What comes again: up to where the target is, at most, and by whole batches where it keeps them."""
        cursor = self._store.get_cursor(self._stream.name, name)
        end = cursor.seq if cursor else self.seq
        span = SeqRange(self.seq, max(self.seq, end if self._until is None else min(self._until, end)))
        if not isinstance(target, Rebatching) or self._rewinds(target) or span.start == span.end:
            return span
        batches = target.batches(self._stream.name, name, span)
        return SeqRange(batches[0].start, batches[-1].end) if batches else SeqRange(span.start, span.start)

    def _instead(self) -> str:
        """What there is to do about changes that the journal does not have any more."""
        return f"replay from there on, or copy the tables anew from the source: millstream reload {self._stream.name}"

    def _rewinds(self, target: Target) -> bool:
        whole = self._asked.until is None and not self._asked.tables
        return isinstance(target, Rewinding) and whole

    def _check_target(self, name: str, target: Target) -> None:
        what = f"target {name} of stream {self._stream.name}"
        if self._rewinds(target):
            return
        if not isinstance(target, Replayable):
            raise NotSupported(
                f"{what} cannot be replayed: a target of kind {target.kind} gets nothing twice",
                hint="replay another target (--target)",
            )
        if target.mirrors and self._asked.until is not None:
            raise NotSupported(
                f"{what} is a mirror, which has one state: a replay that ends before it (until) has no meaning there",
                hint="leave the end out, or replay a changelog (--target)",
            )
        cursor = self._store.get_cursor(self._stream.name, name)
        if cursor is None or cursor.journal_id != self._reader.header().journal_id:
            raise NotReady(f"{what} has got nothing from this journal yet", hint="replay it when it has")

    def _check_tables(self) -> None:
        known = sorted({one.table for one in self._reader.relations().values() if matcher(self._own())(one)})
        for table in self._asked.tables:
            if table not in known:
                there = instead(table, known, none="it has no table yet")
                raise UnknownName(f"the journal has no changes of {table} for stream {self._stream.name}: {there}")

    def _own(self) -> tuple[str, ...]:
        return self._stream.source.tables

    def _start(self) -> int:
        start = self._asked.start
        if isinstance(start, Checkpoint):
            return self._whole(start.seq + 1) if self._within(start.seq) else start.seq
        if isinstance(start, datetime):
            return self._reader.seq_at_time(round(start.timestamp() * 1_000_000))
        if isinstance(start, int):
            return self._whole(start) if self._within(start - 1) else start - 1
        return self._reader.seq_at_position(parse_position(self._reader.header().source_kind, start))

    def _end(self, until: datetime | int | str) -> int:
        if isinstance(until, int):
            planned = self._reader.plan_end(until - 1, max_events=1, max_bytes=1) if self._within(until - 1) else None
            return planned.end if planned else until
        if isinstance(until, datetime):
            return self._reader.seq_at_time(round(until.timestamp() * 1_000_000))
        return self._reader.seq_at_position(parse_position(self._reader.header().source_kind, until))

    def _within(self, seq: int) -> bool:
        """Whether a change after this one is in the journal."""
        head = self._reader.head()
        return head is not None and self._reader.first_seq() - 1 <= seq < head.seq

    def _whole(self, seq: int) -> int:
        """The last seq before the transaction that a change is in."""
        planned = self._reader.plan_end(seq - 1, max_events=1, max_bytes=1)
        cut = self._reader.cut_at(planned.end) if planned else None
        return self._reader.seq_at_position(cut.commit_position) if cut else seq - 1

    def _check_retained(self, seq: int) -> None:
        """Everything after this one must still be in this journal."""
        retained = self._reader.retained()
        first, head = retained.earliest.seq, self._reader.head()
        if seq + 1 < first:
            refused = retained.earliest.refuse(f"seq {seq + 1}", self._reader.header().source_kind)
            raise OutOfRange(refused.message, hint=self._instead())
        if head is not None and seq > head.seq:
            raise OutOfRange(f"seq {seq + 1} is beyond the journal's end, {head.seq}", hint="nothing is there yet")

    def _check_place(self, name: str, place: TargetCursor | None) -> None:
        """Everything after that place must still be in this journal."""
        header, first = self._reader.header(), self._reader.first_seq()
        if place is None:
            whole = first == header.first_seq and header.incarnation == 1
            if self._stream.mode is not Mode.CDC or not whole:
                raise OutOfRange(
                    f"target {name} has no batch that ends at or before seq {self.seq}, and what it began with is not "
                    f"in the journal, which begins at seq {first}",
                    hint=self._instead(),
                )
        elif place.journal_id != header.journal_id or place.seq + 1 < first:
            raise OutOfRange(
                f"target {name} would go on after seq {place.seq}, which the journal does not have any more: it begins "
                f"at seq {first}",
                hint=self._instead(),
            )
