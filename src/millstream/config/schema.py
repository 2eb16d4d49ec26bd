"""The keys of a stream file that every source and target shares, declared once.

`docs/stream-file.md` is held to these models by a test. The keys that belong to one kind of
source or target are declared by that kind; `millstream.config.kinds` says where.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from millstream.config.kinds import SOURCES, SOURCES_LATER, TARGETS, TARGETS_LATER
from millstream.config.problems import Refusal, nearest
from millstream.config.shaping import Keys, ShapeKeys
from millstream.config.units import parse_duration_ms, parse_size
from millstream.model import AckPolicy, Mode, OnFull, OnLimit, OnOverflow, OnReject
from millstream.registry.kinds import IGNORABLE, Kind, Policy

LEAST_VERIFY_MS = 1_000
LEAST_SNAPSHOT_MS = 1_000


def _one_of(now: Iterable[str], later: Iterable[str] = ()) -> Callable[[object], object]:
    """Takes the values there are; says of the others that they will come, or which one was meant."""
    now, later = tuple(now), tuple(later)
    available = f"available: {', '.join(now)}"

    def check(value: object) -> object:
        if value in now:
            return value
        if not isinstance(value, str):
            raise Refusal("must be a word", available)
        if value in later:
            raise Refusal(f"`{value}` is not available in this version", available)
        meant = nearest(value, now)
        raise Refusal(f"`{value}` is not known", f"{meant} {available}" if meant else available)

    return check


def _name(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[a-z][a-z0-9_-]*", value):
        raise Refusal("a name is lower case letters, digits, `_` and `-`, and begins with a letter")
    return value


def _auth_ref(value: object) -> str:
    # What stands here may be a password put in the wrong place: it is not repeated.
    if not isinstance(value, str) or not re.fullmatch(r"(env|file):.+", value):
        raise Refusal("a password is given by reference", "write env:NAME or file:PATH")
    return value


def _tables(value: object) -> object:
    if isinstance(value, str):
        raise Refusal("must be a list", f"write [{value}]")
    if isinstance(value, list):
        twice = {str(item) for item in value if value.count(item) > 1}
        if twice:
            raise Refusal(f"`{min(twice)}` is listed twice", "keep one of the two")
        if not value:
            raise Refusal("the list is empty", "name a table as schema.table, or all of a schema as schema.*")
    return value


def _commit(value: object) -> str:
    if value in ("all", "required"):
        return str(value)
    if isinstance(value, dict) and list(value) == ["quorum"]:
        quorum = value["quorum"]
        if isinstance(quorum, int) and not isinstance(quorum, bool) and quorum >= 1:
            return f"quorum:{quorum}"
        raise Refusal("`quorum` is a whole number of targets, 1 or more")
    raise Refusal("must be all, required or {quorum: N}")


def _retention(value: object) -> object:
    if value == {}:
        raise Refusal("no limit is given", "write {age: 7d}, {bytes: 50GiB} or both; without limits leave it out")
    return value


def _every(value: object) -> int | None:
    if value is None:
        return None
    words = value.split() if isinstance(value, str) else []
    if len(words) != 2 or words[0] != "every":
        raise Refusal("says how often targets are compared with the source", "write: every 1h")
    try:
        every = parse_duration_ms(words[1])
    except ValueError as wrong:
        raise Refusal(str(wrong)) from None
    if every < LEAST_VERIFY_MS:
        raise Refusal("is too often: a comparison reads all rows of both sides", "write every 1h, or what you need")
    return every


def _ddl(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise Refusal("says by kind of schema change what is done about it", "write {drop_column: gate}")
    for kind, policy in value.items():
        _one_of(Kind)(kind)
        _one_of(Policy)(policy)
        if policy == Policy.IGNORE and kind not in IGNORABLE:
            raise Refusal(
                f"{kind} cannot be ignored: what it does to columns or rows has to be done at targets, too",
                f"write apply, gate or halt; ignore is for {', '.join(sorted(IGNORABLE))}",
            )
    return value


LEAST_JOURNAL = 256 << 20
"""A journal goes a segment of 64 MiB at a time, and its last ones always stay."""

Name = Annotated[str, BeforeValidator(_name)]
AuthRef = Annotated[str, BeforeValidator(_auth_ref)]
Duration = Annotated[int, BeforeValidator(parse_duration_ms), Field(gt=0)]
Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]


class _KeysAndOptions(BaseModel):
    # The other keys are options of the kind, and are checked by its own model.
    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)


class BatchKeys(Keys):
    """When a target's batch is cut; each limit that is left out has the default of the target's kind."""

    max_ms: Duration | None = None
    max_bytes: Size | None = None
    max_events: Annotated[int, Field(gt=0)] | None = None


class RetentionKeys(Keys):
    """How much of a source's journal is kept; what is over either limit goes."""

    age: Duration | None = None
    bytes: Size | None = None


class JournalKeys(Keys):
    """How large a source's journal may become while targets are behind."""

    max_bytes: Annotated[int, BeforeValidator(parse_size), Field(ge=LEAST_JOURNAL)]
    on_full: Annotated[OnFull, BeforeValidator(_one_of(OnFull))] = OnFull.BLOCK


class DeadLetterKeys(Keys):
    """How many dead letters a target may have, and what happens beyond."""

    max: Annotated[int, Field(gt=0)] = 1000
    on_overflow: Annotated[OnOverflow, BeforeValidator(_one_of(OnOverflow))] = OnOverflow.HALT


class SnapshotKeys(Keys):
    """What is kept of the targets' states."""

    path: str
    every: Annotated[int, BeforeValidator(parse_duration_ms), Field(ge=LEAST_SNAPSHOT_MS)] | None = None
    keep: Annotated[int, Field(gt=0)] | None = None
    format: Annotated[str, BeforeValidator(_one_of(["arrow", "jsonl"]))] = "arrow"


class SourceKeys(_KeysAndOptions):
    """The keys every source has."""

    name: Name | None = None
    kind: Annotated[str, BeforeValidator(_one_of(SOURCES, SOURCES_LATER))]
    uri: str
    auth_ref: AuthRef | None = None
    tables: Annotated[list[str], BeforeValidator(_tables)]
    ack: Annotated[AckPolicy, BeforeValidator(_one_of(AckPolicy))] = AckPolicy.DELIVERED
    max_source_wal: Size = 4 << 30
    on_limit: Annotated[OnLimit, BeforeValidator(_one_of(OnLimit))] = OnLimit.RELEASE
    retention: Annotated[RetentionKeys, BeforeValidator(_retention)] | None = None
    journal: JournalKeys | None = None
    tenant: Name = "default"


class TargetKeys(_KeysAndOptions):
    """The keys every target has."""

    name: Name
    kind: Annotated[str, BeforeValidator(_one_of(TARGETS, TARGETS_LATER))]
    batch: BatchKeys = BatchKeys()
    required: bool = True
    on_reject: Annotated[OnReject, BeforeValidator(_one_of(OnReject))] = OnReject.LETTER
    dead_letters: DeadLetterKeys = DeadLetterKeys()


class StreamKeys(ShapeKeys):
    """The keys of a stream."""

    name: Name
    source: SourceKeys
    mode: Annotated[Mode, BeforeValidator(_one_of([Mode.CDC, Mode.SNAPSHOT, Mode.SNAPSHOT_THEN_CDC]))]
    targets: Annotated[list[TargetKeys], Field(min_length=1)]
    commit: Annotated[str, BeforeValidator(_commit)] = "all"
    conflict: Annotated[
        str, BeforeValidator(_one_of(["source_wins"], ["last_writer_wins", "dest_wins", "manual_review"]))
    ] = "source_wins"
    checkpoint_interval: Duration = 1_000
    verify: Annotated[int | None, BeforeValidator(_every)] = None
    ddl: Annotated[dict[str, str] | None, BeforeValidator(_ddl)] = None
    snapshots: SnapshotKeys | None = None
