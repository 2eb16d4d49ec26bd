"""Dead letters of a stream that changes its rows on the way: they are what the target would have got."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from millstream import Engine, TargetSpec
from millstream.testing import Script
from millstream.transforms.shape import Shape, Step
from tests.fixtures.engines import QUICK, await_that, stream

COLUMNS = "id INTEGER PRIMARY KEY, words TEXT {check}, extra TEXT, _ms_seq INTEGER"
SHAPE = Shape(transforms=(Step("rename", (("note", "words"),)), Step("add", (("extra", "x"),))))


def run(file: Path, *statements: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(file)) as db:
        found = [db.execute(statement).fetchall() for statement in statements]
        db.commit()
    return found[-1]


def test_a_shaped_row_that_is_refused_is_delivered_when_the_target_takes_it(
    engine: Engine, script: Script, tmp_path: Path
) -> None:
    file = tmp_path / "copy.db"
    refusing = COLUMNS.format(check="CHECK (words <> 'bad')")
    run(file, f'CREATE TABLE "public.orders" ({refusing})')
    copy = TargetSpec("copy", "sqlite", QUICK, options={"path": str(file)})
    taking = COLUMNS.format(check="")
    rows = 'SELECT id, words, extra FROM "public.orders" ORDER BY id'
    with engine:
        engine.upsert_stream(replace(stream(script, tmp_path), targets=(copy,), shape=SHAPE))
        engine.await_ready("shop", 120)
        for number, note in ((1, "good"), (2, "bad"), (3, "good")):
            script.insert("public.orders", id=number, note=note)
        await_that(lambda: run(file, rows) == [(1, "good", "x"), (3, "good", "x")])
        await_that(lambda: len(engine.dead_letters()) == 1)
        (letter,) = engine.dead_letters("shop", "copy")
        assert [one.outcome for one in engine.retry_letters([letter.id])] == ["rejected"]
        run(
            file,
            'ALTER TABLE "public.orders" RENAME TO old',
            f'CREATE TABLE "public.orders" ({taking})',
            'INSERT INTO "public.orders" SELECT * FROM old',
        )
        assert [one.outcome for one in engine.retry_letters([letter.id])] == ["delivered"]
        assert run(file, rows) == [(1, "good", "x"), (2, "bad", "x"), (3, "good", "x")]
