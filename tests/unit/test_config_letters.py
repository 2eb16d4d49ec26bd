"""What a stream file says of rows that a target cannot take, and of a journal that grows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millstream.config import StreamFileError, load_streams
from millstream.config.definition import definition, from_definition
from millstream.engine.capture_order import CaptureOrder
from millstream.model import DeadLetters, JournalLimit, OnFull, OnOverflow, OnReject, StreamSpec

FILE = """\
name: shop
source:
  kind: postgres
  uri: postgresql://app@localhost:5432/shop
  tables: [public.orders]
mode: cdc
targets:
  - name: log
    kind: files
    path: ./log
"""


def loaded(root: Path, more: str) -> StreamSpec:
    (root / "shop.yaml").write_text(FILE + more)
    (stream,) = load_streams([root / "shop.yaml"])
    return stream


def test_what_becomes_of_rows_that_a_target_cannot_take_is_read_and_stored(tmp_path: Path) -> None:
    stream = loaded(tmp_path, "    on_reject: halt\n    dead_letters: {max: 7, on_overflow: drop_oldest}\n")
    (target,) = stream.targets
    assert target.dead_letters == DeadLetters(OnReject.HALT, 7, OnOverflow.DROP_OLDEST)
    assert from_definition(json.loads(json.dumps(definition(stream)))) == stream
    older = definition(stream)
    del older["targets"][0]["dead_letters"]
    assert from_definition(older).targets[0].dead_letters == DeadLetters()


def test_a_wrong_policy_for_dead_letters_is_named(tmp_path: Path) -> None:
    with pytest.raises(StreamFileError) as wrong:
        loaded(tmp_path, "    on_reject: leter\n    dead_letters: {max: 0}\n")
    said = [str(problem) for problem in wrong.value.problems]
    assert ["letter" in said[0], "dead_letters.max" in said[1]] == [True, True]


def test_the_limit_of_a_journal_is_read_and_stored_and_given_to_capture(tmp_path: Path) -> None:
    limited = FILE.replace("mode: cdc", "  journal: {max_bytes: 1GiB, on_full: drop_oldest}\nmode: cdc")
    (tmp_path / "shop.yaml").write_text(limited)
    (stream,) = load_streams([tmp_path / "shop.yaml"])
    assert stream.source.journal == JournalLimit(1 << 30, OnFull.DROP_OLDEST)
    assert from_definition(json.loads(json.dumps(definition(stream)))) == stream
    order = CaptureOrder(stream.source, tmp_path)
    assert CaptureOrder.from_json(json.loads(json.dumps(order.to_json()))) == order
    (tmp_path / "shop.yaml").write_text(limited.replace("1GiB", "1MiB"))
    with pytest.raises(StreamFileError, match=r"journal\.max_bytes"):
        load_streams([tmp_path / "shop.yaml"])
