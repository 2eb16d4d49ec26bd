"""Whether streams may come into a home, or take the place of those it has: asked before anything of them is written.

What a stream cannot be by itself is refused first, then what it cannot be beside the others of the home, then what
it cannot become after what it was. Only a source may be connected to, and one that does not answer is no obstacle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from millstream.config.definition import from_definition, same_source
from millstream.config.kinds import is_mirror
from millstream.engine.commit import ack_position
from millstream.engine.fit import open_target
from millstream.engine.home import Home
from millstream.errors import ConfigError, SecretError, SourceError
from millstream.model import Mode, SourceSpec, StreamSpec
from millstream.snapshots.urls import check_address
from millstream.sources import can_copy, open_source, shadowed_tables
from millstream.state.base import StateStore


def check_streams(store: StateStore, streams: Sequence[StreamSpec], there: Sequence[StreamSpec]) -> None:
    """Raise ConfigError, or NotSupported, unless all of `streams` can be put into a home that has those `there`."""
    for stream in streams:
        _check_alone(stream)
    for stream in streams:
        _check_place(store, stream)
    replaced = {stream.name for stream in streams}
    together = [*(one for one in there if one.name not in replaced), *streams]
    for stream in streams:
        _check_mode(store, stream, together)
        _check_source(stream, together)
    for source in {stream.source.name: stream.source for stream in streams}.values():
        _check_tables(source, together)
    for stream in streams:
        _check_shape(store, stream)


def _check_alone(stream: StreamSpec) -> None:
    """A stream that can never run. Connects to nothing."""
    place = Home(".")
    place.journal_path(stream.source.name)
    if not stream.targets:
        raise ConfigError(f"stream {stream.name} has no target")
    names = [target.name for target in stream.targets]
    for name in names:
        place.checkpoint_path(stream.name, name)
        if names.count(name) > 1:
            raise ConfigError(f"stream {stream.name} has two targets named {name}")
    if stream.mode is Mode.SNAPSHOT:
        _check_copy(stream)
    check_address(stream.snapshots.path if stream.snapshots else None)
    ack_position(stream.commit, stream.targets, {}, journal_id="", head=None, start_position=0)
    open_source(stream.source).close()
    for target in stream.targets:
        open_target(target)


def _check_copy(stream: StreamSpec) -> None:
    """What a stream that only copies cannot have."""
    can_copy(stream.source)
    if stream.verify_every_ms is not None:
        raise ConfigError(
            f"stream {stream.name}: mode snapshot gets no changes, so that nothing can be compared with the source "
            "later (`verify`)",
            hint="leave `verify` out, or use mode snapshot_then_cdc",
        )
    if stream.snapshots is not None:
        raise ConfigError(
            f"stream {stream.name}: mode snapshot gets no changes for a restored target to go on with (`snapshots`)",
            hint="leave `snapshots` out, or use mode snapshot_then_cdc",
        )
    if stream.source.retention or stream.source.journal:
        raise ConfigError(
            f"stream {stream.name}: mode snapshot has no journal that `retention` or `journal` could limit",
            hint="leave them out, or use mode snapshot_then_cdc",
        )


def _check_place(store: StateStore, stream: StreamSpec) -> None:
    """A name whose stream is being deleted is not free yet, and a stream keeps its source."""
    if stream.name in store.deletions():
        raise ConfigError(
            f"stream {stream.name} is being deleted",
            hint=f"finish that first: millstream delete {stream.name}",
        )
    there = store.get_stream(stream.name)
    if there is not None and there["source"]["name"] != stream.source.name:
        raise ConfigError(
            f"stream {stream.name} reads source {there['source']['name']}, not {stream.source.name}",
            hint=f"a stream keeps its source: delete it first (millstream delete {stream.name}), or name "
            "the new one differently",
        )


def _check_mode(store: StateStore, stream: StreamSpec, together: Sequence[StreamSpec]) -> None:
    """A copy stays a copy, and has its source for itself: nothing is captured for it."""
    copies = stream.mode is Mode.SNAPSHOT
    there = store.get_stream(stream.name)
    if there is not None and (from_definition(there).mode is Mode.SNAPSHOT) != copies:
        raise ConfigError(
            f"stream {stream.name} has mode {there['mode']}, and cannot go on with mode {stream.mode.value}",
            hint=f"delete it first (millstream delete {stream.name}) and give it empty targets, or name the new "
            "one differently",
        )
    for other in together:
        if other.source.name == stream.source.name and (other.mode is Mode.SNAPSHOT) != copies:
            raise ConfigError(
                f"streams {stream.name} and {other.name} share source {stream.source.name}, and only one of them "
                "has mode snapshot, which captures nothing",
                hint="give the source another `name` in one of them",
            )


def _check_source(stream: StreamSpec, together: Sequence[StreamSpec]) -> None:
    """Streams on one source must agree on it."""
    for other in together:
        if other.source.name == stream.source.name and not same_source(other.source, stream.source):
            raise ConfigError(
                f"streams {other.name} and {stream.name} describe source {stream.source.name} differently",
                hint="make all but `tables` equal, or give one of the sources another name",
            )


def _check_tables(source: SourceSpec, together: Sequence[StreamSpec]) -> None:
    """A table must not be captured under a name which is another stream's.

    A source that cannot be asked now is asked when its streams start.
    """
    captured = [one for one in together if one.mode is not Mode.SNAPSHOT]
    sharing: Mapping[str, Sequence[str]] = {
        one.name: one.source.tables for one in captured if one.source.name == source.name
    }
    with suppress(SourceError, SecretError):
        for found in shadowed_tables(source, sharing):
            raise ConfigError(found.message, hint=found.fix)


def _check_shape(store: StateStore, stream: StreamSpec) -> None:
    """A mirror has the rows of the filters and transforms it began with: others would leave it half of each."""
    there = store.get_stream(stream.name)
    if there is None or from_definition(there).shape == stream.shape:
        return
    known = {target["name"] for target in there["targets"]}
    begun = [
        target.name
        for target in stream.targets
        if target.name in known and is_mirror(target) and store.get_cursor(stream.name, target.name)
    ]
    if begun:
        raise ConfigError(
            f"stream {stream.name}: its filters or transforms were changed, and {', '.join(begun)} has the rows "
            "that the former ones left",
            hint="give the target another name and place, so that it begins anew with the new ones",
        )
