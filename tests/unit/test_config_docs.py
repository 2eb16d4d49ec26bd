"""The page on stream files and the models say the same keys, and its examples load."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from pydantic import BaseModel

from millstream.config import load_streams
from millstream.config.kinds import MAX_EVENTS, SOURCES, TARGETS, options_model
from millstream.config.schema import (
    BatchKeys,
    DeadLetterKeys,
    JournalKeys,
    RetentionKeys,
    SnapshotKeys,
    SourceKeys,
    StreamKeys,
    TargetKeys,
)
from millstream.config.units import parse_duration_ms, parse_size
from millstream.sources.postgres.options import TypeChoices

PAGE = Path(__file__).parents[2] / "docs" / "stream-file.md"

SECTIONS: dict[str, type[BaseModel]] = {
    "A stream": StreamKeys,
    "A source": SourceKeys,
    "Retention": RetentionKeys,
    "Snapshots": SnapshotKeys,
    "Journal": JournalKeys,
    "Postgres": options_model(SOURCES["postgres"].options),
    "Column types": TypeChoices,
    "A target": TargetKeys,
    "Dead letters": DeadLetterKeys,
    "A batch": BatchKeys,
    "Files": options_model(TARGETS["files"].options),
    "Postgres as a target": options_model(TARGETS["postgres"].options),
    "Delta": options_model(TARGETS["delta"].options),
    "DuckDB": options_model(TARGETS["duckdb"].options),
    "SQLite": options_model(TARGETS["sqlite"].options),
}


def rows(section: str) -> dict[str, str]:
    """Key and default of each row of the section's table."""
    text = re.split(r"^#+ ", PAGE.read_text(), flags=re.MULTILINE)
    (body,) = [part for part in text if part.splitlines()[:1] == [section]]
    return dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", body, re.MULTILINE))


@pytest.mark.parametrize("section", SECTIONS)
def test_each_known_key_is_documented_and_each_documented_key_is_known(section: str) -> None:
    assert set(rows(section)) == set(SECTIONS[section].model_fields)


def test_every_kind_has_a_section() -> None:
    assert (set(SOURCES), set(TARGETS)) == ({"postgres"}, {"files", "delta", "duckdb", "postgres", "sqlite"})


@pytest.mark.parametrize("section", SECTIONS)
def test_required_keys_are_documented_as_required(section: str) -> None:
    required = {name for name, field in SECTIONS[section].model_fields.items() if field.is_required()}
    assert {name for name, default in rows(section).items() if default == "required"} == required


def test_documented_defaults_are_the_real_ones() -> None:
    checked = 0
    for section, model in SECTIONS.items():
        for name, default in rows(section).items():
            field = model.model_fields[name]
            if default.startswith("`") and default.endswith("`") and field.default not in (None, ""):
                real = str(field.default).lower() if isinstance(field.default, bool) else field.default
                assert default.strip("`") in _spellings(real), (section, name)
                checked += 1
    assert checked > 12
    limits = TARGETS["files"].limits
    batch = {name: default.strip("`") for name, default in rows("A batch").items()}
    assert parse_duration_ms(batch["max_ms"]) == limits.max_ms
    assert parse_size(batch["max_bytes"]) == limits.max_bytes
    assert int(batch["max_events"]) == limits.max_events == MAX_EVENTS


def _spellings(value: object) -> Iterable[str]:
    from millstream.config.units import format_duration, format_size

    yield str(value)
    if isinstance(value, int):
        yield format_duration(value)
        yield format_size(value)


def test_every_example_loads(tmp_path: Path) -> None:
    examples = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 2
    names = []
    for number, example in enumerate(examples):
        (tmp_path / f"{number}.yaml").write_text(example)
        names += [(s.name, s.source.name, s.commit) for s in load_streams([tmp_path / f"{number}.yaml"])]
    assert names == [("shop", "shop", "all"), ("shop", "main", "required")]


def test_every_example_of_filters_loads(tmp_path: Path) -> None:
    examples = re.findall(r"```yaml\n(.*?)```", (PAGE.parent / "filters.md").read_text(), re.DOTALL)
    assert examples
    for example in examples:
        (tmp_path / "stream.yaml").write_text(example)
        (stream,) = load_streams([tmp_path / "stream.yaml"])
        assert stream.shape


@pytest.mark.parametrize("kind", sorted(set(TARGETS) - {"files"}))
def test_every_example_of_a_target_loads(tmp_path: Path, kind: str) -> None:
    examples = re.findall(r"```yaml\n(.*?)```", (PAGE.parent / "targets" / f"{kind}.md").read_text(), re.DOTALL)
    assert examples
    for example in examples:
        (tmp_path / "stream.yaml").write_text(example)
        (stream,) = load_streams([tmp_path / "stream.yaml"])
        assert {target.kind for target in stream.targets} == {kind}
