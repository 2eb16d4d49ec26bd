"""Transactions that come before they commit, in blocks and in turns, become the rows they would have been."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.model import Relation
from millstream.sources.base import Block
from millstream.sources.postgres.assemble import Assembler
from millstream.sources.postgres.pgoutput import ProtocolError, frame
from millstream.sources.postgres.spool import Spool
from millstream.sources.postgres.streamed import StreamedAssembler
from tests.fixtures import pgoutput as pg
from tests.fixtures.examples import examples
from tests.unit.test_pgoutput_assembling import Registry


@dataclass
class Rig:
    assembler: Assembler
    blocks: list[Block] = field(default_factory=list)

    def feed(self, *messages: bytes) -> None:
        self.blocks += self.assembler.feed(frame(messages, [len(message) for message in messages]))

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for block in self.blocks if block.rows is not None for row in block.rows.to_pylist()]


def rig(path: Path, kind: type[Assembler] = StreamedAssembler, start: int = 0, budget: int = 1 << 20) -> Rig:
    return Rig(kind(start, Registry(), Spool(path / kind.__name__), budget=budget))


@dataclass
class Transaction:
    """Changes with their subtransactions, of which some are rolled back."""

    xid: int
    changes: list[tuple[int, bytes, int]]
    """Subtransaction (the xid itself for none), message, OID of its table (0: none)."""
    aborted: set[int]
    commits: bool
    streamed: bool


def transactions(draw: random.Random) -> list[Transaction]:
    found = []
    for number in range(1, draw.randint(2, 7)):
        xid = number * 1000
        subs = [xid, *(xid + at for at in range(1, draw.randint(1, 4)))]
        changes = []
        for at in range(draw.randint(0, 12)):
            sub, oid = draw.choice(subs), draw.choice([10, 20])
            kinds = {
                "row": pg.change(draw.choice("IUD"), oid, b"N" + bytes([number, at]) * draw.randint(1, 40)),
                "truncate": pg.truncate(oid),
                "message": pg.message(7, "note", bytes([number, at]), transactional=True),
            }
            kind = draw.choice(["row"] * 8 + ["truncate", "message"])
            changes.append((sub, kinds[kind], 0 if kind == "message" else oid))
        aborted = {sub for sub in subs[1:] if draw.random() < 0.4}
        # A subtransaction that was rolled back writes nothing more, so all of it comes before its abort.
        found.append(Transaction(xid, changes, aborted, draw.random() < 0.8, draw.random() < 0.7))
    return found


def plainly(found: list[Transaction]) -> list[bytes]:
    """Each as it comes when it has committed."""
    said, known = [], set()
    for number, one in enumerate(found, 1):
        if not one.commits:
            continue
        said.append(pg.begin(number * 100, number, one.xid))
        for sub, message, oid in one.changes:
            if sub not in one.aborted:
                said += [pg.relation(oid)] if oid and oid not in known else []
                known.add(oid)
                said.append(message)
        said.append(pg.commit(number * 100, number * 100 + 10, number))
    return said


def streamed(found: list[Transaction], draw: random.Random, *, parallel: bool) -> list[bytes]:
    """The same history: blocks of those that are streamed come before their ends, in turns."""
    turns: list[tuple[float, int, list[bytes]]] = []
    known: set[int] = set()
    for number, one in enumerate(found, 1):
        end = float(number)
        if not one.streamed:
            if one.commits:
                turns.append((end, 0, plainly_one(one, number, known)))
            continue
        described: set[int] = set()
        blocks = [one.changes[at : at + 4] for at in range(0, len(one.changes), 4)] or [[]]
        times = sorted(draw.uniform(max(0, end - 3), end) for _ in blocks)
        for first, (time, block) in enumerate(zip(times, blocks, strict=True)):
            said = [pg.stream_start(one.xid, first=not first)]
            for sub, message, oid in block:
                if oid and oid not in described:
                    described.add(oid)
                    said.append(pg.within(sub, pg.relation(oid)))
                said.append(pg.within(sub, message))
            turns.append((time, 0, [*said, pg.stream_stop()]))
        aborts = [pg.stream_abort(one.xid, sub, parallel=parallel) for sub in sorted(one.aborted)]
        turns.append((end, 1, aborts))
        last = pg.stream_commit(one.xid, number * 100, number * 100 + 10, number)
        turns.append((end, 2, [last if one.commits else pg.stream_abort(one.xid, one.xid, parallel=parallel)]))
        if one.commits:
            known |= described
    turns.sort(key=lambda turn: turn[:2])
    # A block is not cut by anything, and each turn may be followed by a keepalive.
    return [message for _, _, said in turns for message in [*said, *([pg.keepalive(0)] if draw.random() < 0.1 else [])]]


def plainly_one(one: Transaction, number: int, known: set[int]) -> list[bytes]:
    said = [pg.begin(number * 100, number, one.xid)]
    for sub, message, oid in one.changes:
        if sub not in one.aborted:
            # Once more than need be does no harm.
            said += [pg.relation(oid)] if oid else []
            said.append(message)
    return [*said, pg.commit(number * 100, number * 100 + 10, number)]


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**9), st.booleans(), st.sampled_from([1, 200, 1 << 20]))
def test_what_was_streamed_is_what_would_have_come_whole(
    tmp_path: Path, seed: int, parallel: bool, budget: int
) -> None:
    draw = random.Random(seed)
    found = transactions(draw)
    whole, in_turns = rig(tmp_path, Assembler), rig(tmp_path, budget=budget)
    whole.feed(*plainly(found))
    messages = streamed(found, draw, parallel=parallel)
    begin = 0
    while begin < len(messages):
        end = begin + draw.randint(1, 9)
        in_turns.feed(*messages[begin:end])
        begin = end
    assert in_turns.rows == whole.rows
    assert in_turns.assembler.received == max([whole.assembler.received, 0])
    assert list((tmp_path / "StreamedAssembler").iterdir()) == []


def block(xid: int, *messages: bytes, first: bool = True, position: int = 0) -> list[bytes]:
    return [pg.stream_start(xid, first=first), *messages, pg.stream_stop(position)]


def test_rows_come_out_with_the_commit_in_one_transaction_of_several_blocks(tmp_path: Path) -> None:
    r = rig(tmp_path, budget=1)
    rows = [pg.within(5, pg.change("I", 10, b"N" + bytes([at]))) for at in range(3)]
    r.feed(*block(5, pg.within(5, pg.relation(10)), rows[0]), *block(5, rows[1], first=False))
    r.feed(*block(5, rows[2], first=False, position=77))
    assert r.rows == []
    assert (r.assembler.received, r.assembler.reached) == (0, 77)
    r.feed(pg.stream_commit(5, 100, 110, 3))
    assert [(row["tx_index"], row["commit_position"], row["resume_position"], row["txid"]) for row in r.rows] == [
        (at, 100, 110, 5) for at in range(3)
    ]
    assert [block.open_transaction for block in r.blocks if block.rows is not None] == [True, True, False]
    assert r.assembler.received == 110


def test_what_the_journal_has_already_is_dropped_and_its_tables_are_known(tmp_path: Path) -> None:
    r = rig(tmp_path, start=110)
    change = pg.change("I", 10)
    r.feed(*block(5, pg.within(5, pg.relation(10)), pg.within(5, change)), pg.stream_commit(5, 100, 110))
    assert r.rows == []
    r.feed(pg.begin(200), change, pg.commit(200, 210))
    assert [row["relation"] for row in r.rows] == [1]


def test_a_table_is_another_only_to_the_transaction_that_altered_it_until_it_commits(tmp_path: Path) -> None:
    r = rig(tmp_path)
    before, after, change = pg.relation(10), pg.relation(10, columns=("id", "more")), pg.change("I", 10)
    r.feed(pg.begin(10), before, change, pg.commit(10, 11))
    r.feed(*block(5, pg.within(5, after), pg.within(5, change)), pg.begin(20), change, pg.commit(20, 21))
    r.feed(*block(6, pg.within(6, after), pg.within(6, change)), pg.stream_abort(6, 6))
    r.feed(
        pg.begin(30), change, pg.commit(30, 31), pg.stream_commit(5, 40, 41), pg.begin(50), change, pg.commit(50, 51)
    )
    assert [row["relation"] for row in r.rows] == [1, 1, 1, 2, 2]


def test_what_tells_of_an_altered_table_is_no_row_and_is_heard_with_the_commit_before_the_table_is_described(
    tmp_path: Path,
) -> None:
    happened: list[str] = []

    def register(relation: Relation) -> int:
        happened.append(f"described with {len(relation.columns)}")
        return len(relation.columns)

    r = Rig(
        StreamedAssembler(
            0, register, Spool(tmp_path), hear=lambda raw, at, _: happened.append(f"{raw[-1:]!r} at {at}")
        )
    )
    before, after, change = pg.relation(10), pg.relation(10, columns=("id", "more")), pg.change("I", 10)
    told = [pg.message(7, "millstream.ddl.shop", bytes([letter]), transactional=True) for letter in b"ab"]
    said = [before, change, told[0], after, change]
    r.feed(*block(5, *(pg.within(5, message) for message in said)), *block(5, pg.within(6, told[1]), first=False))
    r.feed(pg.stream_abort(5, 6))
    assert happened == []
    r.feed(pg.stream_commit(5, 100, 110))
    assert happened == ["described with 1", "b'a' at 100", "described with 2"]
    assert [(row["tx_index"], row["relation"]) for row in r.rows] == [(0, 1), (1, 2)]


def test_a_lost_connection_forgets_what_was_open(tmp_path: Path) -> None:
    r = rig(tmp_path, budget=1)
    said = block(5, pg.within(5, pg.relation(10)), pg.within(5, pg.change("I", 10)))
    r.feed(*said)
    r.assembler.restart()
    r.feed(*said, pg.stream_commit(5, 100, 110))
    assert len(r.rows) == 1


@pytest.mark.parametrize(
    "said",
    [
        [pg.stream_stop()],
        [pg.stream_commit(5, 100, 110)],
        [pg.stream_start(5, first=False)],
        [*block(5), *block(5)],
        [pg.stream_start(5, first=True), pg.stream_start(6, first=True)],
        [pg.stream_start(5, first=True), pg.begin(10)],
        [pg.begin(10), *block(5)],
        [*block(5, pg.within(5, pg.change("I", 10)))],
        [pg.data(b"P")],
        [*block(5), pg.data(b"c")],
        [pg.data(b"A")],
        [pg.data(b"S")],
        [pg.stream_start(5, first=True), pg.data(b"I\0")],
    ],
)
def test_what_no_server_sends_is_refused(tmp_path: Path, said: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        rig(tmp_path).feed(*said)
