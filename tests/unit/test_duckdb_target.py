"""What is special to the target `duckdb`: its types, its lock, its package."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from millstream.errors import DependencyError, TargetRefused, TargetUnavailable
from tests.fixtures.copies import Copy
from tests.fixtures.tuples import insert, relation, update

LISTS = relation(("id", 23), ("a", 25), ("it's", 1007), key=("id",))


def test_values_have_types_of_their_own(tmp_path: Path) -> None:
    copy = Copy(tmp_path / "copy.db", "duckdb")
    of = relation(
        *(("id", 20), ("yes", 16), ("small", 21), ("double", 701), ("money", 1700, ((38 << 16) | 4) + 4)),
        *(("raw", 17), ("day", 1082), ("at", 1114), ("instant", 1184), ("list", 1007), ("json", 3802)),
        key=("id",),
    )
    row = ("9007199254740993", "t", "-3", "NaN", "1234567890123456789012345678901234.0010", "\\x00ff", "2026-01-31")
    copy.deliver((of, [insert(*row, "infinity", "2026-01-31 12:30:00.000001+00", "{1,NULL}", '{"a": 1}')]))
    ((*found, special, seq),) = copy.rows("SELECT * EXCLUDE (_ms_special, _ms_seq), _ms_special, _ms_seq FROM {t}")
    assert str(found.pop(3)) == "nan"
    assert found == [
        *(9007199254740993, True, -3, Decimal("1234567890123456789012345678901234.0010"), b"\x00\xff"),
        *(date(2026, 1, 31), None, datetime(2026, 1, 31, 12, 30, 0, 1, UTC), [1, None], '{"a": 1}'),
    ]
    assert (special, seq) == ({"at": "infinity"}, 1)


def test_a_kept_value_keeps_its_exact_text(tmp_path: Path) -> None:
    copy = Copy(tmp_path / "copy.db", "duckdb")
    sql = """SELECT id, a, "it's", _ms_special['it''s'] FROM {t} ORDER BY id"""
    copy.deliver((LISTS, [insert("1", "x", "{{1},{2}}"), insert("2", "y", "{3}"), insert("3", "z", "{{4}}")]))
    copy.deliver((LISTS, [update(["1", "new", ...]), update(["7", "moved", ...], key=["3", None, None])]))
    assert copy.rows(sql) == [
        (1, "new", None, "{{1},{2}}"),
        (2, "y", [3], None),
        (7, "moved", None, "{{4}}"),
    ]
    copy.deliver((LISTS, [update(["1", "again", "{5}"])]))
    assert copy.rows(sql)[0] == (1, "again", [5], None)


HOLDER = "import duckdb, sys; held = duckdb.connect(sys.argv[1]); print('open', flush=True); sys.stdin.read()"


def test_a_file_that_is_open_elsewhere_is_tried_again_later(tmp_path: Path) -> None:
    copy = Copy(tmp_path / "copy.db", "duckdb")
    command = [sys.executable, "-c", HOLDER, str(copy.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(TargetUnavailable, match="is open in another process"):
            copy.deliver((LISTS, [insert("1", "x", None)]))
        holder.communicate("")
    copy.deliver((LISTS, [insert("1", "x", None)]))
    assert copy.rows("SELECT id FROM {t}") == [(1,)]


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("no database at all, only some words that a person wrote down here" * 200)
    with pytest.raises(TargetRefused, match="IOException"):
        Copy(tmp_path / "x", "duckdb")
    with pytest.raises(TargetRefused, match="IOException"):
        Copy(tmp_path / "nowhere" / "x", "duckdb")


def test_a_missing_package_is_told_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(DependencyError) as caught:
        Copy(tmp_path / "x", "duckdb")
    assert caught.value.hint == "pip install 'millstream[duckdb]'"
