"""Kill -9 at every durable step of the journal; the next writer and every reader find the truth."""

from __future__ import annotations

import re
import signal
import time
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path

import pytest
from journal_tools import Maker, Transaction, append_in_parts, block, create, numbered, read_all, relation

import millstream.journal
from millstream.journal import JournalReader, JournalWriter, describe, verify
from millstream.model import Retention
from millstream.sources.base import Found, Told
from tests.fixtures.forks import run

SOURCE = Path(millstream.journal.__file__).parent
FAILPOINTS = sorted(
    name for path in SOURCE.glob("*.py") for name in re.findall(r'failpoint\("([a-z_.]+)"\)', path.read_text())
)

ONCE = {
    *("journal.created", "journal.recovered", "journal.relation_written"),
    *("journal.schemas_made", "journal.schema_written", "journal.bound"),
}
"""Steps that a writer passes once."""

BULK = {"journal.adopted"}
"""Steps that only a writer of many rows at a time passes."""

ROUNDS = 25
OPTIONS = {"segment_bytes": 6000, "flush_bytes": 900}


def load(round: int, maker: Maker, *, bulk: bool = False) -> list[Transaction]:
    if bulk:
        return [maker.transaction(6000 if round % 5 else 40, payload=4)]
    return [maker.transaction(400)] if round % 9 == 4 else maker.transactions([1, 7, 3])


def tells(one: Transaction) -> bool:
    """Whether a transaction has told something of a table."""
    return one.commit % 5 == 0


def telling(one: Transaction) -> Told:
    found = (Found("drop_table", f"public.t{one.commit}", one.commit),)
    return Told(one.commit, datetime(2026, 1, 31, tzinfo=UTC), {"position": one.commit}, found)


def go_on(path: Path, *, pruning: bool = False, bulk: bool = False) -> None:
    """Write the load from where the journal ends, and say what was committed. Runs until it is killed."""
    writer = JournalWriter.open(path, **OPTIONS) if (path / "journal.json").exists() else create(path, **OPTIONS)
    writer.bind({**writer.header.identity, "moved": True})
    for number in range(1, 5):
        assert writer.register(relation(number)) == number
    maker = Maker(seed=11)
    for round in range(ROUNDS):
        transactions = [one for one in load(round, maker, bulk=bulk) if one.resume > writer.end]
        for one in transactions:
            told = (telling(one),) if tells(one) else ()
            parts = len(one.rows) > 30 and not bulk
            append_in_parts(writer, one, 30, told) if parts else writer.append(block(one, told=told))
        if writer.commit() is not None:
            print(writer.end, flush=True)
        writer.maintain()
        writer.drop_superseded(float("inf"))
        if pruning:
            # Nothing that a target needs: the rule would take all, and the last rows of 60 are still needed.
            writer.prune_as_requested()
            writer.retain(Retention(bytes=1), writer.head.seq - 60, time.time(), most=2)
    writer.close()


def in_a_process(path: str, pruning: bool, bulk: bool) -> None:
    go_on(Path(path), pruning=pruning, bulk=bulk)


@pytest.mark.parametrize("name", FAILPOINTS)
def test_a_kill_at_a_durable_step_loses_and_doubles_nothing(tmp_path: Path, name: str) -> None:
    path = tmp_path / "j"
    pruning, bulk = name.startswith("retention."), name in BULK
    nth = 1 if name in ONCE else 2 if pruning else 3
    killed = run(in_a_process, str(path), pruning, bulk, environment={"MILLSTREAM_FAILPOINT": f"{name}:{nth}"})
    assert killed.code == -signal.SIGKILL, killed.stderr
    promised = [int(line) for line in killed.stdout.split()]
    if promised:
        head = JournalReader([str(path)]).head()
        assert head is not None
        assert head.covered >= promised[-1], "a promised commit is visible before anybody recovers"
    go_on(path, pruning=pruning, bulk=bulk)
    maker = Maker(seed=11)
    transactions = [one for round in range(ROUNDS) for one in load(round, maker, bulk=bulk)]
    written = numbered(transactions)
    first = JournalReader([str(path)]).first_seq()
    assert (first > 1) == pruning
    assert first <= len(written) - 59
    assert read_all(path).equals(written.slice(first - 1).combine_chunks())
    assert verify(path) == []
    reader = JournalReader([str(path)])
    assert pruning or reader.schemas() == reader.schemas_of_rows()
    ends = accumulate((len(one.rows) for one in transactions), initial=0)
    told = [(one.commit, seq) for one, seq in zip(transactions, ends, strict=False) if tells(one)]
    assert len(told) > 3
    changes = reader.catalog_changes()
    assert [(one.oid, one.seq) for one in changes] == told, "before its transaction, and once"
    assert [one.number for one in changes] == list(range(1, len(told) + 1))
    pruned = describe(path).retained.pruned
    gone = pruned.segment if pruned else 0
    assert all(int(file.name[:8]) > gone for file in (path / "segments").iterdir()), "nothing pruned is left on disk"


def test_the_failpoints_are_those_of_the_durable_steps() -> None:
    assert len(FAILPOINTS) == len(set(FAILPOINTS))
    assert {
        "journal.adopted",
        "journal.bound",
        "journal.created",
        "journal.relation_written",
        "journal.appended",
        "journal.flushed",
        "journal.rolled",
        "journal.rolled_inside",
        "journal.part_named",
        "journal.commit_record_written",
        "journal.synced",
        "journal.head_published",
        "journal.seal_written",
        "journal.manifest_published",
        "journal.superseded_dropped",
        "journal.recovered",
        "journal.schemas_made",
        "journal.schema_written",
        "journal.told_written",
        "retention.decided",
        "retention.manifest_published",
        "retention.segment_removed",
    } == set(FAILPOINTS)
