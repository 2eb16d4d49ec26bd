"""A stream goes into the state store and comes back; a password does not."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from millstream.config.definition import definition, from_definition, has_secret, same_source
from millstream.engine.requests import PATIENCE, refuse_stale
from millstream.errors import RequestFailed
from millstream.model import AckPolicy, BatchLimits, Mode, OnLimit, Retention, SourceSpec, StreamSpec, TargetSpec
from millstream.state.base import Request

LIMITS = BatchLimits(max_ms=1, max_bytes=2, max_events=3)
SHOP = StreamSpec(
    "shop",
    SourceSpec(
        *("main", "postgres", "postgresql://app@host/shop", "env:SECRET", ("public.a", "public.b*")),
        ack=AckPolicy.JOURNALED,
        max_source_wal=7,
        on_limit=OnLimit.STOP,
        options={"slot": "mine", "columns": {"public.a": ["id"]}},
        retention=Retention(1000, None),
    ),
    Mode.CDC,
    (
        TargetSpec("log", "files", LIMITS, required=False, options={"path": "/somewhere"}),
        TargetSpec("copy", "postgres", LIMITS, options={"uri": "postgresql://app@other/shop"}),
    ),
    commit="required",
    checkpoint_interval_ms=250,
)


def test_a_stream_comes_back_as_it_was() -> None:
    assert from_definition(json.loads(json.dumps(definition(SHOP)))) == SHOP
    assert not has_secret(SHOP)


@pytest.mark.parametrize(
    ("uri", "back"),
    [
        ("postgresql://app:hunter2@host/shop", "postgresql://app@host/shop"),
        ("postgresql://app:hunter2@host/shop?sslmode=require", "postgresql://app@host/shop?sslmode=require"),
        ("postgresql://host/shop?password=hunter2&user=app", "postgresql://host/shop?user=app"),
        ("postgresql://host/shop?user=app&password=hunter2", "postgresql://host/shop?user=app"),
    ],
)
def test_a_password_does_not_come_back(uri: str, back: str) -> None:
    at_source = replace(SHOP, source=replace(SHOP.source, uri=uri))
    at_target = replace(SHOP, targets=(replace(SHOP.targets[1], options={"uri": uri}),))
    for stream, whose in ((at_source, "its source"), (at_target, f"its target {SHOP.targets[1].name}")):
        assert has_secret(stream) == whose
        assert "hunter2" not in json.dumps(definition(stream))
        assert "***" not in json.dumps(definition(from_definition(definition(stream))))
    assert from_definition(definition(at_source)).source.uri == back
    assert from_definition(definition(at_target)).targets[0].options["uri"] == back
    assert same_source(at_source.source, from_definition(definition(at_source)).source)


def test_streams_may_share_a_source_that_differs_in_its_tables_only() -> None:
    assert same_source(SHOP.source, replace(SHOP.source, tables=("public.other",)))
    for other in (
        replace(SHOP.source, uri="postgresql://app@elsewhere/shop"),
        replace(SHOP.source, ack=AckPolicy.DELIVERED),
        replace(SHOP.source, options={}),
    ):
        assert not same_source(SHOP.source, other)


def test_what_was_asked_long_ago_is_not_done_any_more() -> None:
    now = datetime.now(UTC)
    refuse_stale(Request(1, "delete", {}, now))
    with pytest.raises(RequestFailed, match="too long ago"):
        refuse_stale(Request(1, "delete", {}, now - timedelta(seconds=PATIENCE + 1)))
