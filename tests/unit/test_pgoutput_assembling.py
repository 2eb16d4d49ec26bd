"""Runs of messages, cut anywhere, become whole transactions in commit order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.model import Op, Relation
from millstream.sources.base import CAPTURED, Block
from millstream.sources.postgres.assemble import Assembler
from millstream.sources.postgres.pgoutput import ProtocolError, frame
from millstream.sources.postgres.spool import Spool
from tests.fixtures import pgoutput as pg
from tests.fixtures.examples import examples


@dataclass
class Registry:
    """Gives ids from 1, the same id for the same content."""

    ids: dict[str, int] = field(default_factory=dict)

    def __call__(self, relation: Relation) -> int:
        return self.ids.setdefault(relation.fingerprint(), len(self.ids) + 1)


@dataclass
class Rig:
    assembler: Assembler
    blocks: list[Block] = field(default_factory=list)

    def feed(self, *messages: bytes) -> list[Block]:
        new = list(self.assembler.feed(frame(messages, [len(message) for message in messages])))
        self.blocks += new
        return new

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for block in self.blocks if block.rows is not None for row in block.rows.to_pylist()]


def rig(tmp_path: Path, start: int = 0, budget: int = 1 << 20) -> Rig:
    return Rig(Assembler(start, Registry(), Spool(tmp_path / "spool"), budget=budget))


def facts(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["tx_index"], chr(row["op"]), row["commit_position"], row["resume_position"], row["relation"]


def test_a_transaction_becomes_rows_with_positions_time_and_index(tmp_path: Path) -> None:
    r = rig(tmp_path)
    sent = [pg.change("I", 10, b"Na"), pg.change("U", 10, b"Nbb"), pg.change("D", 10, b"Kccc")]
    r.feed(pg.begin(100, ts=1_500_000, xid=4_000_000_000), pg.relation(10), *sent, pg.commit(100, 140))
    assert [facts(row) for row in r.rows] == [(0, "c", 100, 140, 1), (1, "u", 100, 140, 1), (2, "d", 100, 140, 1)]
    assert [row["payload"] for row in r.rows] == [message[25:] for message in sent]
    assert {row["txid"] for row in r.rows} == {4_000_000_000}
    assert {row["commit_ts"].isoformat() for row in r.rows} == {"2000-01-01T00:00:01.500000+00:00"}
    (block,) = r.blocks
    assert block.rows.schema == CAPTURED
    assert (block.open_transaction, block.progress, r.assembler.received) == (False, None, 140)


def test_nothing_comes_out_before_the_commit_arrives(tmp_path: Path) -> None:
    r = rig(tmp_path)
    r.feed(pg.begin(100), pg.relation(10), pg.change("I", 10))
    r.feed(pg.change("I", 10))
    assert r.rows == []
    blocks = r.feed(pg.commit(100, 140))
    assert [block.open_transaction for block in blocks if block.rows] == [True, False]
    assert [facts(row)[0] for row in r.rows] == [0, 1]


def test_a_transaction_that_ends_in_the_run_of_its_last_row_stays_together(tmp_path: Path) -> None:
    r = rig(tmp_path)
    r.feed(pg.begin(100), pg.relation(10), pg.change("I", 10))
    blocks = r.feed(pg.change("I", 10), pg.commit(100, 140), pg.begin(150), pg.change("I", 10), pg.commit(150, 160))
    assert [block.open_transaction for block in blocks] == [True, False]
    assert [facts(row)[:4] for row in r.rows] == [(0, "c", 100, 140), (1, "c", 100, 140), (0, "c", 150, 160)]


def test_a_truncate_of_several_tables_is_a_row_for_each(tmp_path: Path) -> None:
    r = rig(tmp_path)
    r.feed(
        *(pg.begin(1), pg.relation(10, name="a"), pg.relation(20, name="b"), pg.change("I", 20)),
        *(pg.truncate(20, 10), pg.change("I", 10), pg.commit(1, 9)),
    )
    assert [facts(row) for row in r.rows] == [
        *((0, "c", 1, 9, 2), (1, "t", 1, 9, 2), (2, "t", 1, 9, 1), (3, "c", 1, 9, 1)),
    ]
    assert r.rows[1]["payload"] == r.rows[2]["payload"] == pg.truncate(20, 10)[25:]


def test_a_table_described_anew_inside_a_transaction_gets_a_new_relation_from_there(tmp_path: Path) -> None:
    r = rig(tmp_path)
    r.feed(
        *(pg.begin(1), pg.relation(10), pg.change("I", 10), pg.relation(10, columns=("id", "more"))),
        *(pg.change("I", 10), pg.relation(10), pg.change("I", 10), pg.commit(1, 9)),
    )
    assert [row["relation"] for row in r.rows] == [1, 2, 1]


def test_logical_messages_in_a_transaction_are_rows_of_it(tmp_path: Path) -> None:
    r = rig(tmp_path)
    sent = pg.message(77, "outbox", b"hello", transactional=True)
    r.feed(pg.begin(1), pg.relation(10), pg.change("I", 10), sent, pg.change("I", 10), pg.commit(1, 9))
    assert [facts(row) for row in r.rows] == [(0, "c", 1, 9, 1), (1, "m", 1, 9, 0), (2, "c", 1, 9, 1)]
    assert r.rows[1]["payload"] == sent[25:]


def test_a_message_outside_is_a_transaction_of_its_own_and_never_shares_a_position(tmp_path: Path) -> None:
    r = rig(tmp_path)
    # The commit record starts where the record of the message ended.
    r.feed(
        *(pg.message(200, "note", b"x", transactional=False, clock=7_000_000), pg.begin(200), pg.relation(10)),
        *(pg.change("I", 10), pg.commit(200, 240), pg.message(280, "note", transactional=False)),
    )
    assert [facts(row) for row in r.rows] == [(0, "m", 199, 200, 0), (0, "c", 200, 240, 1), (0, "m", 279, 280, 0)]
    assert len({(row["commit_position"], row["tx_index"]) for row in r.rows}) == 3
    assert (r.rows[0]["txid"], r.rows[0]["commit_ts"].isoformat()) == (0, "2000-01-01T00:00:07+00:00")


def test_a_heartbeat_is_progress_and_no_row(tmp_path: Path) -> None:
    r = rig(tmp_path)
    (block,) = r.feed(pg.message(200, "millstream.heartbeat", transactional=False))
    assert (block.rows, block.progress) == (None, 200)
    (block,) = r.feed(pg.message(300, "millstream.heartbeats", transactional=False))
    assert (block.rows.num_rows, block.progress) == (1, None)


def test_a_keepalive_is_progress_only_outside_a_transaction(tmp_path: Path) -> None:
    r = rig(tmp_path, start=10)
    assert [b.progress for b in r.feed(pg.keepalive(50))] == [50]
    assert [b.progress for b in r.feed(pg.keepalive(40))] == [None]
    assert [b.progress for b in r.feed(pg.begin(100), pg.relation(10), pg.keepalive(90), pg.change("I", 10))] == [None]
    assert [b.progress for b in r.feed(pg.keepalive(95, reply=True))] == [None]
    assert [(k.wal_end, k.reply) for k in r.assembler.keepalives] == [(95, True)]
    blocks = r.feed(pg.commit(100, 140), pg.keepalive(180), pg.begin(200), pg.keepalive(190), pg.change("I", 10))
    assert [b.progress for b in blocks] == [None, 180]
    assert r.assembler.received == 180


def test_an_empty_transaction_is_progress_and_no_row(tmp_path: Path) -> None:
    r = rig(tmp_path)
    (block,) = r.feed(
        pg.begin(100), pg.data(b"Y\0\0\0\1s\0t\0"), pg.data(b"O" + bytes(8) + b"o\0"), pg.commit(100, 140)
    )
    assert (block.rows, block.progress) == (None, 140)


def test_what_ends_at_or_before_the_start_is_dropped(tmp_path: Path) -> None:
    r = rig(tmp_path, start=140)
    r.feed(pg.begin(100), pg.relation(10), pg.change("I", 10))
    r.feed(pg.change("I", 10), pg.commit(100, 140), pg.begin(150))
    r.feed(pg.change("U", 10), pg.commit(150, 160))
    assert [facts(row) for row in r.rows] == [(0, "u", 150, 160, 1)]


def test_a_message_at_the_start_is_dropped_and_the_commit_behind_it_is_not(tmp_path: Path) -> None:
    r = rig(tmp_path, start=200)
    r.feed(
        *(pg.message(200, "note", transactional=False), pg.begin(200), pg.relation(10)),
        *(pg.change("I", 10), pg.commit(200, 240)),
    )
    assert [facts(row) for row in r.rows] == [(0, "c", 200, 240, 1)]


def test_a_large_transaction_waits_on_disk_and_comes_out_whole(tmp_path: Path) -> None:
    r = rig(tmp_path, budget=2000)
    r.feed(pg.begin(100), pg.relation(10))
    sent = [pg.change("I", 10, bytes([n % 251]) * (n % 90)) for n in range(200)]
    for n in range(0, 200, 20):
        r.feed(*sent[n : n + 20])
    assert r.assembler._spool.batches > 5
    assert r.rows == []
    blocks = r.feed(pg.commit(100, 140), pg.begin(150), pg.change("I", 10), pg.commit(150, 160))
    filled = [block for block in blocks if block.rows is not None]
    assert [block.open_transaction for block in filled] == [True] * (len(filled) - 2) + [False, False]
    assert [row["payload"] for row in r.rows] == [message[25:] for message in [*sent, pg.change("I", 10)]]
    assert [facts(row)[0] for row in r.rows] == [*range(200), 0]
    assert {row["resume_position"] for row in r.rows[:200]} == {140}
    assert r.assembler._spool.batches == 0


def test_a_large_transaction_below_the_start_is_dropped_from_disk(tmp_path: Path) -> None:
    r = rig(tmp_path, start=140, budget=100)
    r.feed(pg.begin(100), pg.relation(10), *[pg.change("I", 10)] * 20)
    assert r.assembler._spool.batches == 1
    blocks = r.feed(pg.commit(100, 140))
    assert [(block.rows, block.progress) for block in blocks] == [(None, None)]
    assert r.assembler._spool.batches == 0


def test_the_spool_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "tmpleft").write_bytes(b"x")
    Spool(tmp_path / "spool")
    assert list((tmp_path / "spool").iterdir()) == []


@pytest.mark.parametrize(
    "sent",
    [
        [pg.change("I", 10)],
        [pg.begin(1), pg.begin(2)],
        [pg.commit(1, 2)],
        [pg.begin(1), pg.commit(2, 3)],
        [pg.begin(1), pg.commit(1, 9), pg.change("I", 10)],
        [pg.begin(1), pg.message(5, "x", transactional=False), pg.commit(1, 9)],
        [pg.begin(5), pg.commit(5, 9), pg.begin(3), pg.commit(3, 4)],
        [pg.begin(1), pg.change("I", 99), pg.commit(1, 9)],
        [pg.data(b"S\0\0\0\1\1")],
    ],
)
def test_messages_that_the_plugin_never_sends_are_refused(tmp_path: Path, sent: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        rig(tmp_path).feed(pg.begin(0), pg.relation(10), pg.commit(0, 1), *sent)


CHANGES = st.lists(st.tuples(st.sampled_from("IUDMTRk"), st.sampled_from([10, 20]), st.binary(max_size=30)), max_size=8)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    transactions=st.lists(st.tuples(st.booleans(), CHANGES), max_size=12),
    cuts=st.lists(st.integers(0, 150), max_size=20),
    budget=st.integers(0, 600),
    start=st.integers(0, 400),
)
def test_any_cut_gives_the_rows_of_a_row_at_a_time_reading(
    tmp_path: Path, transactions: list[Any], cuts: list[int], budget: int, start: int
) -> None:
    sent, wanted = _script(transactions, start)
    r = rig(tmp_path, start=start, budget=budget)
    edges = sorted({0, *(cut for cut in cuts if cut < len(sent)), len(sent)})
    for low, high in itertools.pairwise(edges):
        r.feed(*sent[low:high])
    assert [(*facts(row), row["payload"]) for row in r.rows] == wanted
    _blocks_end_where_transactions_do(r.blocks)


def _script(transactions: list[Any], start: int) -> tuple[list[bytes], list[tuple[Any, ...]]]:
    """The messages of some transactions, and what a plain reading of them gives."""
    sent = [pg.begin(1), pg.relation(10, name="a"), pg.relation(20, name="b"), pg.commit(1, 2)]
    wanted: list[tuple[Any, ...]] = []
    ops = {"I": Op.CREATE, "U": Op.UPDATE, "D": Op.DELETE}
    for number, (outside, changes) in enumerate(transactions):
        position, end = 10 + 40 * number, 40 + 40 * number
        rows: list[tuple[Any, ...]] = []
        if outside:
            sent.append(pg.message(end, "note", b"x", transactional=False))
            rows.append((0, "m", end - 1, end, 0, sent[-1][25:]))
        else:
            sent.append(pg.begin(position))
            for tag, oid, body in changes:
                before = len(rows)
                if tag == "R":
                    sent.append(pg.relation(oid, name="a" if oid == 10 else "b"))
                elif tag == "k":
                    sent.append(pg.keepalive(position - 1))
                elif tag == "M":
                    sent.append(pg.message(5, "m", body, transactional=True))
                    rows.append((before, "m", position, end, 0, sent[-1][25:]))
                elif tag == "T":
                    sent.append(pg.truncate(oid, 30 - oid))
                    for n, emptied in enumerate((oid, 30 - oid)):
                        rows.append((before + n, "t", position, end, emptied // 10, sent[-1][25:]))
                else:
                    sent.append(pg.change(tag, oid, body))
                    rows.append((before, chr(ops[tag]), position, end, oid // 10, sent[-1][25:]))
            sent.append(pg.commit(position, end))
        wanted += rows if end > start else []
    return sent, wanted


def _blocks_end_where_transactions_do(blocks: list[Block]) -> None:
    filled = [block for block in blocks if block.rows is not None]
    for block, following in itertools.zip_longest(filled, filled[1:]):
        last = block.rows.column("commit_position")[-1]
        goes_on = following is not None and following.rows.column("commit_position")[0] == last
        assert block.open_transaction == goes_on
        assert not (block.open_transaction and block.progress)


def test_another_session_may_send_again_what_has_come_out(tmp_path: Path) -> None:
    r = rig(tmp_path)
    r.feed(pg.begin(100), pg.relation(10), pg.change("I", 10), pg.commit(100, 140), pg.begin(150), pg.change("I", 10))
    r.assembler.restart()
    r.feed(pg.begin(100), pg.relation(10), pg.change("I", 10), pg.commit(100, 140))
    r.feed(pg.begin(150), pg.change("I", 10), pg.change("U", 10), pg.commit(150, 160))
    assert [facts(row)[:4] for row in r.rows] == [(0, "c", 100, 140), (0, "c", 150, 160), (1, "u", 150, 160)]


def test_a_position_is_covered_once_and_never_inside_a_transaction(tmp_path: Path) -> None:
    r = rig(tmp_path)
    assert [r.assembler.cover(position).progress for position in (50, 50, 40, 60)] == [50, None, None, 60]
    r.feed(pg.begin(100), pg.relation(10), pg.change("I", 10))
    with pytest.raises(ProtocolError, match="in the middle of a transaction"):
        r.assembler.cover(200)
    assert r.assembler.received == 60
