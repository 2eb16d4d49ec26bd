"""A stream as the state store remembers it: plain JSON, without a secret in it; and the stream back from that."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from millstream.model import (
    AckPolicy,
    BatchLimits,
    DeadLetters,
    JournalLimit,
    Json,
    Mode,
    OnFull,
    OnLimit,
    OnOverflow,
    OnReject,
    Retention,
    SnapshotRules,
    SourceSpec,
    StreamSpec,
    TargetSpec,
)
from millstream.secrets import redact
from millstream.transforms.shape import Shape

_STARRED = re.compile(
    r"(?i):\*\*\*(?=@)"  # user:***@host
    r"|&(?:ssl)?password=\*\*\*|(?<=\?)(?:ssl)?password=\*\*\*&?"  # ?password=***&more
    r"|\s*(?:ssl)?password\s*=\s*\*\*\*"  # host=... password=***
)


def definition(spec: StreamSpec) -> Json:
    """The stream as JSON. Passwords are starred out; what refers to one (`auth_ref`) stays."""
    value: dict[str, Any] = asdict(spec)
    value["mode"] = spec.mode.value
    source = value["source"]
    source["uri"] = redact(spec.source.uri)
    source["ack"] = spec.source.ack.value
    source["on_limit"] = spec.source.on_limit.value
    if spec.source.journal is not None:
        source["journal"]["on_full"] = spec.source.journal.on_full.value
    source["tables"] = list(spec.source.tables)
    value["targets"] = list(value["targets"])
    # Left out where it says nothing: streams that were written down before there was such a thing stay the same.
    if spec.source.tenant == "default":
        del source["tenant"]
    value["ddl"] = dict(spec.ddl)
    if not spec.ddl:
        del value["ddl"]
    if spec.snapshots is None:
        del value["snapshots"]
    del value["shape"]
    if spec.shape:
        value["shape"] = spec.shape.to_json()
    for target in value["targets"]:
        if isinstance(target["options"].get("uri"), str):
            target["options"] = {**target["options"], "uri": redact(target["options"]["uri"])}
        letters = target["dead_letters"]
        target["dead_letters"] = {name: getattr(value, "value", value) for name, value in letters.items()}
    return value


def from_definition(value: Mapping[str, Any]) -> StreamSpec:
    """The stream back. A password that stood in its URI is gone; libpq then looks in PGPASSWORD and .pgpass."""
    source = value["source"]
    return StreamSpec(
        name=value["name"],
        source=SourceSpec(
            name=source["name"],
            kind=source["kind"],
            uri=_STARRED.sub("", source["uri"]),
            auth_ref=source["auth_ref"],
            tables=tuple(source["tables"]),
            ack=AckPolicy(source["ack"]),
            max_source_wal=source["max_source_wal"],
            on_limit=OnLimit(source["on_limit"]),
            options=source["options"],
            retention=Retention(**source["retention"]) if source["retention"] else None,
            journal=journal_limit(source.get("journal")),
            tenant=source.get("tenant", "default"),
        ),
        mode=Mode(value["mode"]),
        targets=tuple(
            TargetSpec(
                name=target["name"],
                kind=target["kind"],
                limits=BatchLimits(**target["limits"]),
                required=target["required"],
                options=_without_stars(target["options"]),
                dead_letters=_dead_letters(target.get("dead_letters")),
            )
            for target in value["targets"]
        ),
        commit=value["commit"],
        checkpoint_interval_ms=value["checkpoint_interval_ms"],
        shape=Shape.from_json(value["shape"]) if "shape" in value else Shape(),
        verify_every_ms=value.get("verify_every_ms"),
        ddl=tuple(sorted(dict(value.get("ddl", {})).items())),
        snapshots=SnapshotRules(**value["snapshots"]) if "snapshots" in value else None,
    )


def journal_limit(value: Mapping[str, Any] | None) -> JournalLimit | None:
    """A limit back from JSON."""
    return JournalLimit(value["max_bytes"], OnFull(value["on_full"])) if value else None


def _dead_letters(value: Mapping[str, Any] | None) -> DeadLetters:
    """What a definition says; the defaults where it was written before there was anything to say."""
    if value is None:
        return DeadLetters()
    return DeadLetters(OnReject(value["on_reject"]), value["max"], OnOverflow(value["on_overflow"]))


def has_secret(spec: StreamSpec) -> str | None:
    """Whose URI a password stands in, if one does: the stream cannot be written down then without losing it."""
    uris = [("its source", spec.source.uri)]
    uris += [(f"its target {target.name}", str(target.options.get("uri", ""))) for target in spec.targets]
    return next((whose for whose, uri in uris if redact(uri) != uri), None)


def _without_stars(options: Mapping[str, Any]) -> Mapping[str, Any]:
    uri = options.get("uri")
    return {**options, "uri": _STARRED.sub("", uri)} if isinstance(uri, str) else options


def same_source(one: SourceSpec, other: SourceSpec) -> bool:
    """Whether two streams may share a capture: everything but the tables is alike (passwords are not compared)."""

    def alike(source: SourceSpec) -> Json:
        value = asdict(source)
        del value["tables"]
        return {**value, "uri": _STARRED.sub("", redact(source.uri)), "options": dict(source.options)}

    return alike(one) == alike(other)
