"""A repair of a target of which one table has no key: the others are mended, and that one is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from millstream.engine import verify
from millstream.engine.compare import Counted, Differing
from millstream.engine.verify import TargetVerification
from millstream.model import Column, Relation

KEYED = Relation(1, "public", "item", "d", (Column("id", 23, key=True),), ("id",))
KEYLESS = Relation(2, "public", "bag", "n", (Column("v", 25),), ())


class Plan(SimpleNamespace):
    """As much of a comparison's plan as is asked for; it remembers which tables were compared again."""

    again: Sequence[int] = ()

    def only(self, tables: Sequence[int]) -> Plan:
        self.again = tables
        return self

    def reread(self) -> Plan:
        return self


class Comparing:
    """Takes the place of Spark: a row of each table differs, until it is repaired."""

    repaired: Sequence[Differing] = ()

    def __init__(self, spark: Any, plan: Plan) -> None: ...

    def count(self) -> dict[int, Counted]:
        mended = {one.table for one in Comparing.repaired}
        return {number: Counted(3, 3, () if number in mended else (7,)) for number in (0, 1)}

    def narrow(self, counted: Any, most: int) -> tuple[dict[int, tuple[int, int, int]], list[Differing]]:
        found = [Differing(0, '{"id":1}', 1, 1, 1), Differing(1, None, 3, 1, 1)]
        return {0: (0, 1, 0), 1: (1, 0, 1)}, found

    def repair(self, repairer: Any, differing: Sequence[Differing]) -> None:
        Comparing.repaired = differing


def test_a_table_without_a_key_keeps_no_other_from_being_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(what: str, plan: Any, found: Any, act: Callable[[], Any]) -> Any:
        return act()

    monkeypatch.setattr(verify, "Comparing", Comparing)
    monkeypatch.setattr(Comparing, "repaired", ())
    it: Any = object.__new__(TargetVerification)
    it._spark, it._job, plan = None, job, Plan(relations=(KEYED, KEYLESS))
    item, bag = it._compare(plan, None, object())
    assert [one.key for one in Comparing.repaired] == ['{"id":1}']
    assert plan.again == [0]
    assert (item.repaired, item.equal, item.keyed, item.keys) == (True, True, True, ('{"id":1}',))
    assert (bag.repaired, bag.equal, bag.keyed, bag.missing, bag.extra) == (False, False, False, 1, 1)
