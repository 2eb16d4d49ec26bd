"""What a stream file says of rows that a target cannot take, and of a journal that grows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millstream.config import StreamFileError, load_streams
from millstream.config.definition import definition, from_definition
from millstream.model import DeadLetters, OnOverflow, OnReject, StreamSpec

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
