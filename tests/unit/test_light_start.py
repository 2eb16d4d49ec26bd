"""Decoding does not import pandas: that takes two seconds, at every start of a command that shows changes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

from tests.fixtures.tuples import NUMERIC_12_2, delete, insert, journal_rows, relation, update

PROGRAM = """
import pickle, sys
from millstream import changelog
rows, relation = pickle.load(sys.stdin.buffer)
batch = changelog.assemble(rows, relation, 1, "0123456789ab")
print(batch.num_rows, "pandas" in sys.modules)
"""


def test_decoding_needs_no_pandas() -> None:
    of = relation(
        ("id", 20), ("a", 1009), ("d", 1082), ("n", 1700, NUMERIC_12_2), ("b", 17), ("m", 790), ("t", 16), key=["id"]
    )
    nothing = [None] * 6
    rows = journal_rows(
        [
            insert("1", '{"a b",c}', "infinity", "NaN", "\\x00", "$1.00", "t"),
            update(["2", ..., "2024-01-01", "1.00", b"\xff", None, "x"], key=["1", *nothing]),
            delete(key=["2", *nothing]),
        ]
    )
    source = str(Path(__file__).parents[2] / "src")
    program = [sys.executable, "-c", f"import sys; sys.path.insert(0, {source!r}); {PROGRAM.strip()}"]
    done = subprocess.run(program, input=pickle.dumps((rows, of)), capture_output=True, check=True, timeout=120)
    assert done.stdout.decode().split() == ["3", "False"]
