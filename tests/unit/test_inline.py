"""Which columns every update sends, and what `check` says of filters that need another one."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.model import Column, Mode, SourceSpec, StreamSpec, TargetSpec
from millstream.sources.base import Severity
from millstream.sources.postgres.inline import always_sent
from millstream.transforms.check import shape_findings
from millstream.transforms.shape import FieldFilter, Shape
from tests.fixtures.engines import QUICK
from tests.fixtures.tuples import relation

NUMERIC, TEXT, VARCHAR, BPCHAR, BIT, VARBIT = 1700, 25, 1043, 1042, 1560, 1562


def declared(precision: int, scale: int) -> int:
    return (precision << 16 | scale & 0x7FF) + 4


@pytest.mark.parametrize(
    ("oid", "modifier", "sent"),
    [
        (23, -1, True),
        (2950, -1, True),
        (1184, 3, True),
        (869, -1, True),
        (NUMERIC, declared(10, 2), True),
        (NUMERIC, declared(1000, 0), True),
        (NUMERIC, declared(3, -2), True),
        (NUMERIC, -1, False),
        (VARCHAR, 5 + 4, True),
        (VARCHAR, 6 + 4, False),
        (VARCHAR, -1, False),
        (BPCHAR, 2 + 4, True),
        (BPCHAR, 10 + 4, False),
        (BIT, 1, True),
        (VARBIT, 128, True),
        (VARBIT, 129, False),
        (VARBIT, -1, False),
        (TEXT, -1, False),
        (17, -1, False),
        (3802, -1, False),
        (1231, declared(10, 2), False),
        (99_999, -1, False),
    ],
)
def test_a_column_is_always_sent_if_no_value_of_it_can_be_large(oid: int, modifier: int, sent: bool) -> None:
    assert always_sent(Column("it", oid, modifier)) is sent
    domain = Column("it", 99_998, type_kind="d", base_type_oid=oid, base_type_mod=modifier)
    assert always_sent(domain) is sent


def test_an_enum_is_always_sent_and_a_domain_of_unknown_base_is_not() -> None:
    assert always_sent(Column("it", 99_999, type_kind="e"))
    assert not always_sent(Column("it", 99_999, type_kind="d"))


@pytest.mark.parametrize(
    ("column", "named"),
    [(("total", NUMERIC, declared(10, 2)), []), (("total", NUMERIC), ["total"]), (("total", TEXT), ["total"])],
)
def test_check_warns_of_a_filter_that_needs_a_value_which_may_not_be_sent(column: Any, named: list[str]) -> None:
    source = SourceSpec("main", "postgres", "postgresql://shop", None, ("public.*",))
    target = TargetSpec("log", "files", QUICK, options={"path": "./log"})
    shape = Shape(fields=(FieldFilter(column[0], "equals", ("1",)),))
    stream = StreamSpec("shop", source, Mode.CDC, (target,), shape=shape)
    found = shape_findings(stream, [relation(("id", 23), column, key=("id",))], lambda *_: ())
    told = [one.message for one in found if one.severity is Severity.WARNING]
    assert [f"({name})" in message for name, message in zip(named, told, strict=True)] == [True] * len(named)
