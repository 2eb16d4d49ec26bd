"""Stream files to streams: every problem of every file at once, or all of the streams.

    load_streams([Path("shop.yaml")]) -> [StreamSpec(name="shop", ...)]

A file holds one stream, or several under `streams:`. Relative paths in it are relative to the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from pydantic import BaseModel

from millstream.config import shaping
from millstream.config.definition import same_source
from millstream.config.document import read_document
from millstream.config.kinds import KEPT, SOURCES, TARGETS, SourceKind, TargetKind, check_pattern, options_model
from millstream.config.problems import Problem, StreamFileError, in_order, nearest
from millstream.config.report import Reporter
from millstream.config.schema import SnapshotKeys, SourceKeys, StreamKeys, TargetKeys
from millstream.errors import ConfigError
from millstream.model import (
    BatchLimits,
    DeadLetters,
    JournalLimit,
    Mode,
    Retention,
    SnapshotRules,
    SourceSpec,
    StreamSpec,
    TargetSpec,
)
from millstream.snapshots.urls import problem_with
from millstream.transforms.shape import EVERY

Kinds = Mapping[str, SourceKind] | Mapping[str, TargetKind]


@dataclass
class _Found:
    """A stream that has no problem of its own, with where it stands."""

    spec: StreamSpec
    report: Reporter


def load_streams(
    paths: Iterable[Path | str],
    *,
    environment: Mapping[str, str] = os.environ,
    on_warning: Callable[[Problem], None] | None = None,
) -> list[StreamSpec]:
    """Read stream files. Raises StreamFileError (a ConfigError) that lists all problems of all files.

    `on_warning` hears of what works but should be done otherwise, such as a password in a URI.
    """
    problems: list[Problem] = []
    warnings: list[Problem] = []
    found: list[_Found] = []
    for path in paths:
        found += _load_file(Path(path), environment, problems, warnings)
    _check_together(found)
    if problems:
        raise StreamFileError(in_order(problems))
    for warning in warnings:
        if on_warning is not None:
            on_warning(warning)
    return [one.spec for one in found]


def _load_file(
    path: Path, environment: Mapping[str, str], problems: list[Problem], warnings: list[Problem]
) -> list[_Found]:
    file = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        problems.append(Problem(file, None, None, "", "not UTF-8 text", "save the file as UTF-8"))
        return []
    except OSError as error:
        problems.append(Problem(file, None, None, "", f"cannot be read: {error.strerror}", "check the path"))
        return []
    tree, wrong = read_document(text, file, environment)
    problems += wrong
    if tree is None:
        return []
    base = path.absolute().parent
    found: list[_Found] = []
    for report in _stream_reporters(Reporter(file, tree, problems, warnings)):
        spec = _stream(report, base)
        if spec is not None:
            found.append(_Found(spec, report))
    return found


def _stream_reporters(report: Reporter) -> list[Reporter]:
    """One for each stream of the file."""
    value = report.tree.value
    if not isinstance(value, dict):
        report.problem((), "a stream file is a mapping", "begin with `name: ...`")
        return []
    if "streams" not in value:
        return [report]
    for key in value:
        if key != "streams":
            report.problem((key,), "stands beside `streams`", "move it into the streams it belongs to", of_key=True)
    if not isinstance(value["streams"], list) or not value["streams"]:
        report.problem(("streams",), "must be a list of streams")
        return []
    return [report.under("streams", index) for index in range(len(value["streams"]))]


def _stream(report: Reporter, base: Path) -> StreamSpec | None:
    """The stream, or None when something is wrong with it, which has been reported."""
    count = len(report.problems)
    raw = report.tree.value
    keys = report.validate((), StreamKeys, raw)
    if not isinstance(raw, dict):
        return None
    source = _source_options(report, raw.get("source"), base)
    raw_targets = raw["targets"] if isinstance(raw.get("targets"), list) else []
    targets = [_target_options(report, index, target, base) for index, target in enumerate(raw_targets)]
    _check_uri(report, ("source",), raw.get("source"), SOURCES)
    for index, target in enumerate(raw_targets):
        _check_uri(report, ("targets", index), target, TARGETS)
    _check_tables(report, raw.get("source"))
    if keys is not None:
        _check_shape(report, keys)
        _check_casts(report, keys)
    _check_target_names(report, raw_targets)
    _check_commit(report, raw.get("commit", "all"), raw_targets)
    if keys is not None and keys.snapshots is not None:
        _check_snapshots(report, keys)
    if raw.get("mode") == Mode.SNAPSHOT:
        _check_copy(report, raw)
    if keys is None or len(report.problems) > count:
        return None
    return StreamSpec(
        name=keys.name,
        source=_source_spec(keys.source, keys.name, source, base),
        mode=keys.mode,
        targets=tuple(_target_spec(one, options) for one, options in zip(keys.targets, targets, strict=True)),
        commit=keys.commit,
        checkpoint_interval_ms=keys.checkpoint_interval,
        shape=shaping.made(keys, lambda reference: _absolute_ref(reference, base)),
        verify_every_ms=keys.verify,
        ddl=tuple(sorted((keys.ddl or {}).items())),
        snapshots=_snapshot_rules(keys.snapshots, base),
    )


def _snapshot_rules(keys: SnapshotKeys | None, base: Path) -> SnapshotRules | None:
    if keys is None:
        return None
    return SnapshotRules(_absolute(keys.path, base), keys.every, keys.keep, keys.format)


def _source_spec(keys: SourceKeys, stream: str, options: Mapping[str, Any], base: Path) -> SourceSpec:
    return SourceSpec(
        name=keys.name or stream,
        kind=keys.kind,
        uri=keys.uri,
        auth_ref=_absolute_ref(keys.auth_ref, base) if keys.auth_ref else None,
        tables=tuple(keys.tables),
        ack=keys.ack,
        max_source_wal=keys.max_source_wal,
        on_limit=keys.on_limit,
        retention=Retention(keys.retention.age, keys.retention.bytes) if keys.retention else None,
        journal=JournalLimit(keys.journal.max_bytes, keys.journal.on_full) if keys.journal else None,
        options=options,
        tenant=keys.tenant,
    )


def _target_spec(keys: TargetKeys, options: Mapping[str, Any]) -> TargetSpec:
    default = TARGETS[keys.kind].limits
    limits = BatchLimits(
        max_ms=keys.batch.max_ms or default.max_ms,
        max_bytes=keys.batch.max_bytes or default.max_bytes,
        max_events=keys.batch.max_events or default.max_events,
    )
    letters = DeadLetters(keys.on_reject, keys.dead_letters.max, keys.dead_letters.on_overflow)
    return TargetSpec(keys.name, keys.kind, limits, keys.required, options, letters)


def _source_options(report: Reporter, raw: object, base: Path) -> Mapping[str, Any]:
    if not isinstance(raw, dict) or raw.get("kind") not in SOURCES:
        _suggest_keys(report, ("source",), raw, SourceKeys, SOURCES)
        return {}
    return _options(report, ("source",), raw, SourceKeys, SOURCES[raw["kind"]].options, base)


def _target_options(report: Reporter, index: int, raw: object, base: Path) -> Mapping[str, Any]:
    if not isinstance(raw, dict) or raw.get("kind") not in TARGETS:
        _suggest_keys(report, ("targets", index), raw, TargetKeys, TARGETS)
        return {}
    kind = TARGETS[raw["kind"]]
    left = dict(raw)
    for key, choices in kind.choices.items():
        if left.get(key) in choices.later:
            hint = f"available: {', '.join(choices.now)}"
            report.problem(("targets", index, key), f"`{left[key]}` is not available in this version", hint)
            left[key] = choices.now[0]
    return _options(report, ("targets", index), left, TargetKeys, kind.options, base)


def _suggest_keys(
    report: Reporter, at: Sequence[str | int], raw: object, shared: type[BaseModel], kinds: Kinds
) -> None:
    """Keys of a thing of no kind: where one kind is meant all that it does not know, else what is meant as `kind`."""
    if not isinstance(raw, dict):
        return
    meant = get_close_matches(str(raw.get("kind")), kinds, n=1)
    if meant:
        report.refuse_unknown(at, raw, [*shared.model_fields, *options_model(kinds[meant[0]].options).model_fields])
    elif "kind" not in raw:
        report.refuse_unknown(at, {key: None for key in raw if nearest(key, ["kind"])}, ["kind"])


def _options(
    report: Reporter, at: Sequence[str | int], raw: Mapping[str, Any], shared: type[BaseModel], place: str, base: Path
) -> Mapping[str, Any]:
    """The options of one kind: checked by its own model, only those that were given, as JSON values."""
    model = options_model(place)
    report.refuse_unknown(at, raw, [*shared.model_fields, *model.model_fields])
    given = {key: value for key, value in raw.items() if key in model.model_fields}
    options = report.validate(at, model, given)
    if options is None:
        return {}
    values = options.model_dump(mode="json", exclude_unset=True)
    if isinstance(values.get("path"), str):
        values["path"] = _absolute(values["path"], base)
    if isinstance(values.get("auth_ref"), str):
        values["auth_ref"] = _absolute_ref(values["auth_ref"], base)
    return values


def _absolute(path: str, base: Path) -> str:
    return path if "://" in path else str(base / Path(path).expanduser())


def _absolute_ref(auth_ref: str, base: Path) -> str:
    kind, _, name = auth_ref.partition(":")
    return f"file:{_absolute(name, base)}" if kind == "file" else auth_ref


def _check_uri(report: Reporter, at: Sequence[str | int], raw: object, kinds: Kinds) -> None:
    """Says nothing of the URI's content: what looks wrong may be a secret."""
    if not isinstance(raw, dict) or not isinstance(raw.get("uri"), str) or raw.get("kind") not in kinds:
        return
    schemes = kinds[raw["kind"]].schemes
    if not schemes:
        return
    try:
        parts = urlsplit(raw["uri"])
        parameters = {key.lower() for key, _ in parse_qsl(parts.query)}
        has_password = bool(parts.password) or not parameters.isdisjoint({"password", "sslpassword"})
    except ValueError:
        parts, has_password = None, False
    at = (*at, "uri")
    if parts is None or parts.scheme not in schemes or not parts.netloc + parts.query:
        report.problem(at, f"not a {raw['kind']} URI", f"write {schemes[0]}://user@host:port/database")
    elif has_password and raw.get("auth_ref") is not None:
        report.problem(at, "a password stands in the URI and `auth_ref` names another", "keep `auth_ref` only")
    elif has_password:
        report.warning(at, "a password stands in the URI", "take it out and name where it is: auth_ref: env:NAME")


def _check_tables(report: Reporter, raw: object) -> None:
    if not isinstance(raw, dict) or not isinstance(raw.get("tables"), list) or raw.get("kind") not in SOURCES:
        return
    for index, pattern in enumerate(raw["tables"]):
        if isinstance(pattern, str):
            try:
                check_pattern(SOURCES[raw["kind"]], pattern)
            except ConfigError as wrong:
                report.problem(("source", "tables", index), wrong.message, wrong.hint)


def _check_shape(report: Reporter, keys: StreamKeys) -> None:
    """The table patterns of filters and transforms."""
    named: list[tuple[tuple[str | int, ...], str]] = [(("filter", pattern), pattern) for pattern in keys.filter]
    tables = [(("match", index), one.tables) for index, one in enumerate(keys.match)]
    tables += [(("transforms", index), one.tables) for index, one in enumerate(keys.transforms)]
    for place, patterns in tables:
        named += [((*place, "tables", number), pattern) for number, pattern in enumerate(patterns)]
    for at, pattern in named:
        try:
            check_pattern(SOURCES[keys.source.kind], pattern)
        except ConfigError as wrong:
            report.problem(at, wrong.message, wrong.hint)


def _check_casts(report: Reporter, keys: StreamKeys) -> None:
    """The types that casts name. Whether a column can become its type is known only with its table."""
    casts = [(at, one.tables, one.cast) for at, one in enumerate(keys.transforms) if one.cast]
    if not casts:
        return
    # Not at the top: that costs the time that Arrow takes to load, and few files cast.
    from millstream.transforms.columns import CASTS, named_type, type_names

    for index, tables, cast in casts:
        of = "of every table" if tuple(tables) == EVERY else f"of {', '.join(tables)}"
        for column, wanted in cast.items():
            if named_type(wanted) is None:
                meant = nearest(wanted, type_names())
                hint = f"{meant} types: {CASTS}" if meant else f"types: {CASTS}"
                report.problem(("transforms", index, "cast", column), f"`{wanted}` for {column} {of} is no type", hint)


def _check_target_names(report: Reporter, raw: Sequence[object]) -> None:
    first: dict[str, int] = {}
    for index, target in enumerate(raw):
        name = target.get("name") if isinstance(target, dict) else None
        if not isinstance(name, str):
            continue
        if name in first:
            line, _ = report.tree.place(("targets", first[name], "name"))
            at = ("targets", index, "name")
            report.problem(at, f"another target is named `{name}`, on line {line}", "give it a name of its own")
        first.setdefault(name, index)


def _check_commit(report: Reporter, commit: object, targets: Sequence[object]) -> None:
    optional = [i for i, one in enumerate(targets) if isinstance(one, dict) and one.get("required") is False]
    if isinstance(commit, dict) and isinstance(commit.get("quorum"), int) and commit["quorum"] > len(targets) > 0:
        report.problem(("commit", "quorum"), f"asks for {commit['quorum']} of {len(targets)} targets")
    if commit == "required" and targets and len(optional) == len(targets):
        report.problem(("commit",), "no target is required", "take `required: false` from one of them")
    if commit != "required":
        for index in optional:
            hint = "write `commit: required` on the stream, or take it out"
            report.problem(("targets", index, "required"), "has no meaning without `commit: required`", hint)


OF_CHANGES = (
    *("ack", "max_source_wal", "on_limit", "retention", "journal"),
    *("publication", "heartbeat_interval", "status_interval", "watch_interval", "origin", "messages", "failover"),
    *("catch_up", "catch_up_behind", "catch_up_sessions", "snapshot_at_once"),
)
"""Keys of a source that are about its log, and mean nothing where only rows are copied."""


def _check_snapshots(report: Reporter, keys: StreamKeys) -> None:
    """A target whose state can be kept, and a place that can be opened; changes to go on with."""
    if not any(target.kind in KEPT for target in keys.targets):
        message = "no target of the stream has a state that can be kept"
        report.problem(("snapshots",), message, f"those of kind {' and '.join(KEPT)} have", of_key=True)
    wrong = problem_with(keys.snapshots.path) if keys.snapshots else None
    if wrong is not None:
        report.problem(("snapshots", "path"), *wrong)


def _check_copy(report: Reporter, raw: Mapping[str, Any]) -> None:
    """What a stream that only copies its tables has no use for, so that nobody relies on it."""
    source = raw["source"] if isinstance(raw.get("source"), dict) else {}
    places = [("source", key) for key in OF_CHANGES if key in source]
    for at in [*places, *((key,) for key in ("verify", "snapshots") if raw.get(key) is not None)]:
        hint = "take it out, or write `mode: snapshot_then_cdc`"
        report.problem(at, "has no meaning with `mode: snapshot`, which gets no changes", hint, of_key=True)


def _check_together(found: Sequence[_Found]) -> None:
    """What only shows across streams and files: names, shared sources, shared directories."""
    names: dict[str, Reporter] = {}
    sources: dict[str, StreamSpec] = {}
    paths: dict[str, str] = {}
    for one in found:
        spec, report = one.spec, one.report
        if spec.name in names:
            line, _ = names[spec.name].tree.place(("name",))
            where = f"{names[spec.name].file}:{line}"
            report.problem(("name",), f"another stream is named `{spec.name}`, at {where}", "give it a name of its own")
        names.setdefault(spec.name, report)
        other = sources.setdefault(spec.source.name, spec)
        if not same_source(other.source, spec.source):
            hint = "make all but `tables` equal, or give one a `name` of its own"
            message = f"stream `{other.name}` has another source of the name `{spec.source.name}`"
            report.problem(("source",), message, hint)
        if (other.mode is Mode.SNAPSHOT) != (spec.mode is Mode.SNAPSHOT):
            message = f"stream `{other.name}` on the same source has mode {other.mode.value}: a mere copy shares none"
            report.problem(("mode",), message, "give one of the sources a `name` of its own")
        for index, target in enumerate(spec.targets):
            path = target.options.get("path")
            if path is None:
                continue
            if path in paths:
                hint = "give each target a directory of its own"
                report.problem(("targets", index, "path"), f"target {paths[path]} writes there too", hint)
            paths.setdefault(path, f"{spec.name}/{target.name}")
