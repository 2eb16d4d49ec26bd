"""What an executor says of itself, and what a task does when it is not fit."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

from millstream.errors import ExecutorUnfit, TargetUnavailable
from millstream.spark import probe
from millstream.spark.probe import Needed, check_myself, myself
from millstream.targets.base import Attempt
from millstream.targets.files import FilesStager
from tests.fixtures.journals import Journal, shop_table


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal.create(tmp_path / "journal")
    yield made
    made.writer.close()


@pytest.fixture
def needed(journal: Journal) -> Needed:
    return Needed.here({tuple(journal.locations): journal.writer.header.journal_id})


def test_this_process_is_fit_for_itself(needed: Needed) -> None:
    assert myself(needed).lacks is None
    check_myself(needed)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": "0.0.9"}, "has millstream 0.1.0, the driver 0.0.9"),
        ({"python": "3.99"}, "the driver 3.99"),
        ({"journals": ((("/nowhere/at all",), "an id"),)}, "cannot read the journal at /nowhere/at all"),
    ],
)
def test_what_an_executor_lacks_is_named_with_its_host(
    needed: Needed, change: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.__version__", "0.1.0")
    needed = replace(needed, version="0.1.0")
    with pytest.raises(ExecutorUnfit) as unfit:
        check_myself(replace(needed, **change))  # type: ignore[arg-type]
    assert said in unfit.value.message
    assert f"the executor on {socket.gethostname()}" in unfit.value.message
    assert unfit.value.hint
    assert unfit.value.transient, "another executor may do"


def test_another_journal_at_the_same_place_is_no_journal(needed: Needed, journal: Journal) -> None:
    (locations, _), = needed.journals  # fmt: skip
    with pytest.raises(ExecutorUnfit, match="has another journal at"):
        check_myself(replace(needed, journals=((locations, "another id"),)))


def test_an_executor_that_was_not_fit_is_asked_again(needed: Needed, journal: Journal) -> None:
    hidden = journal.path.with_name("hidden")
    shutil.move(journal.path, hidden)
    with pytest.raises(ExecutorUnfit):
        check_myself(needed)
    shutil.move(hidden, journal.path)
    check_myself(needed)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ModuleNotFoundError: No module named 'millstream'", "has no millstream to import"),
        ("[PYTHON_VERSION_MISMATCH] Python in worker has different version", "runs another Python"),
        ('Cannot run program "/opt/venv/bin/python": error=2', "to run"),
        ("something with a secret in it", "Spark reported PySparkException"),
    ],
)
def test_executors_that_cannot_answer(text: str, said: str) -> None:
    error = probe._cannot_even_answer(PySparkException(text))
    assert said in error.message
    assert "secret" not in str(error)


def test_a_directory_that_only_the_driver_sees_is_no_place_to_stage(tmp_path: Path) -> None:
    from millstream.changelog import assemble
    from millstream.journal import JournalReader, open_slice
    from millstream.model import SeqRange

    journal = Journal.create(tmp_path / "journal")
    table = shop_table("t", 1000)
    journal.register(table)
    journal.transaction([("public.t", 1, "one")])
    (piece,) = JournalReader(journal.locations).slices(SeqRange(0, 1))
    rows = assemble(open_slice(piece, journal.locations), table, 1, "x")
    journal.writer.close()
    stager = FilesStager(str(tmp_path / "log" / "_millstream" / "staging" / "a run"), 1, "zstd")
    with pytest.raises(TargetUnavailable, match=r"does not see .*staging, which the driver has made"):
        stager.stage(table, 1, iter([rows]), Attempt(0, 0))
    assert not (tmp_path / "log").exists()
