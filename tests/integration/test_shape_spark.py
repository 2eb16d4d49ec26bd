"""The same rows on both ways: filters and transforms by column in a task, and by Spark's SQL on DataFrames."""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from millstream.errors import ConfigError, TargetRefused
from millstream.fold import fold
from millstream.model import BatchLimits, Relation, StreamState
from millstream.spark.changes import Shaped
from millstream.spark.shaped import gathered
from millstream.targets.rejects import Outstanding, RowsRejected, packed, unpacked
from millstream.transforms.shape import FieldFilter, Shape, Shaping, SqlFilter, Step
from tests.fixtures.delivery import Bench
from tests.fixtures.histories import History, Row
from tests.fixtures.journals import Journal, shop_table
from tests.fixtures.rereading import Rereading
from tests.fixtures.shaped import as_they_are, shaped_by_spark, with_letters
from tests.fixtures.stagers import Killed
from tests.fixtures.tuples import delete, update

pytestmark = pytest.mark.spark

BY_FIELDS = (FieldFilter("note", "in", ("", "a note")), FieldFilter("shop", "in", (0, 1)))
BY_SQL = (SqlFilter("note IN ('', 'a note')"), SqlFilter("shop < 2", ("public.*",)))
WITHOUT_DOC = Step("drop", (("doc", None),))
AS_TEXT = Step("cast", (("amount", "string"),))
ADDED = Step("add", (("origin", "eu"),))
ADDED_BY_SQL = Step("add_sql", (("origin", "'eu'"),))


HISTORIES = int(os.environ.get("MILLSTREAM_HISTORIES", "1"))
"""How many random histories are tried; `make histories` tries more."""


IN_TENTHS = Step("cast", (("amount", "decimal(12,1)"),))
BY_COLUMN = Shape(fields=BY_FIELDS, transforms=(WITHOUT_DOC, IN_TENTHS, ADDED))
PLAIN = Shape(filters=BY_SQL, transforms=(WITHOUT_DOC, IN_TENTHS, ADDED_BY_SQL))
MIXED = Shape(
    filters=BY_SQL[:1],
    fields=BY_FIELDS[1:],
    transforms=(ADDED_BY_SQL, WITHOUT_DOC, IN_TENTHS, Step("select", (("*", None),))),
)


def histories(full: bool) -> Iterator[tuple[History, list[pa.RecordBatch]]]:
    for seed in range(HISTORIES):
        history = History(seed, full).play(120)
        yield history, [batch for table in history.batches([7, 40, 41, 90]) for batch in table.to_batches()]


def table_of(batches: list[pa.RecordBatch]) -> pa.Table:
    return pa.Table.from_batches([batch for batch in batches if batch.num_rows]) if batches else pa.table({})


def assert_same(one: pa.Table, other: pa.Table) -> None:
    assert one.schema.equals(other.schema)
    for name in one.column_names:
        assert one[name].to_pylist() == other[name].to_pylist(), name


@pytest.mark.parametrize("by_sql", [PLAIN, MIXED], ids=["plain", "mixed"])
@settings(
    max_examples=1 if HISTORIES == 1 else HISTORIES,
    deadline=None,
    derandomize=HISTORIES == 1,
    # An example takes seconds: the shortest one is looked for only where there is time for that.
    phases=(Phase.generate,) if HISTORIES == 1 else tuple(Phase),
)
@given(
    decides=st.randoms(use_true_random=False),
    identity=st.sampled_from(["default", "full", "index"]),
    steps=st.integers(10, 60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_both_ways_give_the_same_changes_and_letters(
    spark: SparkSession,
    tmp_path_factory: pytest.TempPathFactory,
    by_sql: Shape,
    decides: random.Random,
    identity: str,
    steps: int,
    cuts: list[int],
) -> None:
    """Rows enter and leave the filters, and some cannot be cast, however the changes are cut."""
    history = History(decides, identity == "full", identity == "index").play(steps)
    batches = [batch for table in history.batches(cuts) for batch in table.to_batches()]
    shaping, relation = Shaping("shop", BY_COLUMN, True), history.relation
    expected, letters = with_letters(lambda known: list(Shaped(shaping, relation, 1, batches, known)))
    scratch = tmp_path_factory.mktemp("shaped")
    found, others = with_letters(lambda known: shaped_by_spark(spark, by_sql, relation, batches, scratch, known)[1])
    told = [{(one.event_id, one.key, one.kind, one.reason) for one in some} for some in (letters, others)]
    assert told[0] == told[1]
    order = [*table_of(expected).column_names] if expected else []
    assert_same(table_of(found).select(order), table_of(expected))


def test_sql_carries_values_that_were_not_sent_and_exact_texts(spark: SparkSession, tmp_path: Path) -> None:
    """What nobody sent follows its column through names and functions of it alone; NaN keeps its text."""
    shape = Shape(
        transforms=(
            Step(
                "select",
                (
                    ("shop", None),
                    ("id AS code", None),
                    ("doc AS text", None),
                    ("upper(doc) AS loud", None),
                    ("amount", None),
                ),
            ),
            Step("rename", (("text", "words"),)),
            Step("add_sql", (("louder", "concat(loud, '!')"),)),
        )
    )
    for number, (history, batches) in enumerate(histories(False)):
        relation, found, _ = shaped_by_spark(spark, shape, history.relation, batches, tmp_path / str(number))
        assert relation.key == ("shop", "code")
        folded = fold(found, relation.key)
        rows = {
            (row["shop"], row["code"], row["words"], row["loud"], row["louder"], _text(row))
            for row in folded.to_pylist()
        }
        assert rows == {
            (int(shop), id, doc, doc and doc.upper(), doc and doc.upper() + "!", amount)
            for shop, id, _, doc, amount in history.rows.values()
        }


def _text(row: dict[str, Any]) -> str | None:
    amount = dict(row["_ms_special"]).get("amount", row["amount"])
    return None if amount is None else str(amount)


@pytest.mark.parametrize("full", [True, False])
def test_a_function_leaves_rows_out_and_moves_them(spark: SparkSession, tmp_path: Path, full: bool) -> None:
    more = () if full else (WITHOUT_DOC,)
    shape = Shape(
        filters=(SqlFilter("shop < 2"),),
        transforms=(
            *more,
            Step("python", (("tests.fixtures.shaped:noted", None),)),
            Step("python", (("tests.fixtures.shaped:shuffled", None),)),
            Step("rename", (("id", "code"),)),
        ),
    )
    history, batches = next(histories(full))
    relation, found, _ = shaped_by_spark(spark, shape, history.relation, batches, tmp_path)
    assert relation.key == ("shop", "code")
    assert "amount" not in {column.name for column in relation.columns}
    rows = {(row["shop"], row["code"], row["note"], row["size"]) for row in fold(found, relation.key).to_pylist()}
    assert rows == {
        (int(shop), id, note and note.upper(), None if note is None else len(note))
        for shop, id, note, _, _ in history.rows.values()
        if int(shop) < 2
    }


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("doubled", "makes rows that are of no row it got, or several of one"),
        ("rekeyed", "changes shop, which is part of the key"),
    ],
)
def test_a_function_that_is_no_transform_is_refused(
    spark: SparkSession, tmp_path: Path, function: str, said: str
) -> None:
    history, batches = next(histories(True))
    shape = Shape(transforms=(Step("python", ((f"tests.fixtures.shaped:{function}", None),)),))
    with pytest.raises(TargetRefused, match=said):
        shaped_by_spark(spark, shape, history.relation, batches, tmp_path)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (Shape(filters=(SqlFilter("noet = 'a'"),)), "filter: public.t has no column noet"),
        (Shape(filters=(SqlFilter("note"),)), "filter: public.t: the filter gives string, and not true or false"),
        (Shape(filters=(SqlFilter("rand() < 0.5"),)), "filter: public.t: the filter depends on chance"),
        (Shape(filters=(SqlFilter("note = = 'a'"),)), "filter: public.t: Syntax error at or near '='"),
        (Shape(transforms=(Step("add_sql", (("n", "count(*)"),)),)), "add: public.t: no aggregates"),
        (Shape(transforms=(Step("add_sql", (("note", "1"),)),)), "add: public.t has a column note already"),
        (Shape(transforms=(Step("select", (("shop", None),)),)), "select: public.t.id is part of the key"),
        (
            Shape(transforms=(Step("select", (("shop", None), ("id", None), ("struct(1) AS s", None))),)),
            "public.t.s: .*no type",
        ),
        (
            Shape(transforms=(Step("python", (("tests.fixtures.shaped:gone", None),)),)),
            "tests.fixtures.shaped has no gone",
        ),
        (
            Shape(transforms=(Step("python", (("tests.fixtures.shaped:nameless", None),)),)),
            "takes the columns _ms_seq, ",
        ),
        (Shape(transforms=(Step("python", (("nowhere:gone", None),)),)), "nowhere:gone cannot be imported"),
    ],
)
def test_what_does_not_compile_names_stream_table_and_column(
    spark: SparkSession, tmp_path: Path, shape: Shape, said: str
) -> None:
    with pytest.raises(ConfigError, match=f"^stream shop: .*{said}"):
        shaped_by_spark(spark, shape, History(1).relation, [], tmp_path)


def sent(change: pa.Table) -> pa.Table:
    """The change as if nothing had been left out of it."""
    place = change.column_names.index("_ms_unchanged")
    return change.set_column(place, change.schema.field(place), pa.array([[]], change.schema.field(place).type))


def test_a_value_that_was_not_sent_and_is_needed_is_never_guessed(spark: SparkSession, tmp_path: Path) -> None:
    history, batches = next(histories(False))
    filtered = Shape(filters=(SqlFilter("doc <> ''"),))
    with pytest.raises(RowsRejected, match="a filter needs doc, whose value is large") as lacking:
        shaped_by_spark(spark, filtered, history.relation, batches, tmp_path, Outstanding(True))
    assert {one.kind for one in lacking.value.rejects} == {"unsent"}
    # With all values there is nothing to ask for.
    whole = {one.event_id: packed(sent(unpacked(one.row))) for one in lacking.value.rejects}
    shaped_by_spark(spark, filtered, history.relation, batches, tmp_path, Outstanding(True, completed=whole))
    for shape, said in (
        (Shape(transforms=(BOTH,)), "public.t: both is computed from doc, whose value is large"),
        (
            Shape(transforms=(Step("python", (("tests.fixtures.shaped:noted", None),)),)),
            "public.t: python tests.fixtures.shaped:noted is to get doc, whose value is large",
        ),
    ):
        with pytest.raises(RowsRejected, match=said) as lacking:
            shaped_by_spark(spark, shape, history.relation, batches, tmp_path, Outstanding(True), isolate=False)
        assert {one.kind for one in lacking.value.rejects} == {"unsent"}


def joined_texts(row: Row) -> tuple[Any, ...]:
    """A row of `HALFWAY`, by hand."""
    shop, id, note, doc, amount = row
    return int(shop), id, amount, doc and doc.upper(), f"{doc or '-'}/{note}", f"{doc or '-'}/{note}!"


def is_noted(row: Row) -> bool:
    return row[2] is not None and row[2].startswith("a note")


BOTH = Step("add_sql", (("both", "concat(coalesce(doc, '-'), '/', note)"),))
HALFWAY = (
    BOTH,
    Step(
        "select",
        (
            ("shop", None),
            ("id", None),
            ("amount", None),
            ("upper(doc) AS loud", None),
            ("both", None),
            ("concat(both, '!') AS most", None),
        ),
    ),
)
"""The doc alone, and together with what is always sent."""
BY_NOTE = SqlFilter("note LIKE 'a note%'")
UNSENT = {"in one job": Shape(transforms=HALFWAY), "after a filter": Shape(filters=(BY_NOTE,), transforms=HALFWAY)}
BY_FUNCTION = Shape(filters=(BY_NOTE,), transforms=(Step("python", (("tests.fixtures.shaped:both_texts", None),)),))


@pytest.mark.parametrize("way", UNSENT)
@settings(
    max_examples=HISTORIES,
    deadline=None,
    phases=(Phase.explicit,) if HISTORIES == 1 else tuple(Phase),
)
@given(
    decides=st.randoms(use_true_random=False),
    index=st.booleans(),
    steps=st.integers(10, 60),
    cuts=st.lists(st.integers(0, 60), max_size=3),
    ahead=st.integers(0, 40),
)
@example(decides=3, index=False, steps=40, cuts=[20], ahead=1)
def test_sql_over_values_that_were_not_sent_leaves_the_rows_of_the_source(
    spark: SparkSession,
    tmp_path_factory: pytest.TempPathFactory,
    way: str,
    decides: random.Random | int,
    index: bool,
    steps: int,
    cuts: list[int],
    ahead: int,
) -> None:
    """However far the source has gone on, and wherever batches are cut: in the end all rows are right, no letters."""
    history = History(decides, False, index, alike=True).play(steps)
    late = history.late if HISTORIES > 1 else []
    mirror = reread(spark, UNSENT[way], history, tmp_path_factory.mktemp("mirror"), [*cuts, *late], ahead)
    wanted = {joined_texts(row) for row in history.rows.values() if way == "in one job" or is_noted(row)}
    found = mirror.copy.rows("SELECT shop, id, amount, loud, both, most FROM {t}") if mirror.copy.exists() else []
    assert set(found) == wanted
    if decides == 3:
        assert wanted
        assert set(mirror.told) == {"letters.repaired", "letters.added"}, "the source was asked, not always in time"


@pytest.mark.skipif(HISTORIES == 1, reason="takes many Spark jobs: make histories")
@pytest.mark.parametrize("seed", range(HISTORIES // 10))
def test_a_function_of_values_that_were_not_sent_leaves_the_rows_of_the_source(
    spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    history = History(seed, alike=True).play(40)
    mirror = reread(spark, BY_FUNCTION, history, tmp_path, [seed, 20, *history.late], seed)
    wanted = {joined_texts(row)[:2] + joined_texts(row)[4:5] for row in history.rows.values() if is_noted(row)}
    assert set(mirror.copy.rows("SELECT shop, id, both FROM {t}")) == wanted


def reread(
    spark: SparkSession, shape: Shape, history: History, directory: Path, cuts: list[int], ahead: int
) -> Rereading:
    """A mirror of the history by way of Spark; no letter is left of it."""

    def shaped(
        batches: list[pa.RecordBatch], known: Outstanding | None, isolate: bool
    ) -> tuple[Relation, list[pa.RecordBatch]]:
        return shaped_by_spark(spark, shape, history.relation, batches, directory, known, isolate=isolate)[:2]

    mirror = Rereading(history, shape, shaped, directory, ahead)
    with pytest.MonkeyPatch.context() as patched:
        mirror.deliver(cuts, patched)
    assert [one for one in mirror.store.letters() if one.state.value == "waiting"] == []
    return mirror


def test_sql_that_fails_on_a_row_is_named_without_the_value(
    spark: SparkSession, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = spark.range(1).selectExpr("CAST(concat('hunter', id) AS INT) AS relation")
    with pytest.raises(TargetRefused) as refused:
        gathered([rows], as_they_are, one_task=True, stream="shop")
    said = "stream shop: a filter or transform in SQL fails on a row: CAST_INVALID_INPUT"
    assert refused.value.message == said
    assert "hunter" not in str(refused.value) + "".join(capfd.readouterr())


@pytest.mark.parametrize(("kind", "step"), [("sqlite", "lane.committed"), ("files", "files.staged")])
def test_a_batch_in_sql_comes_once_though_its_worker_is_killed(
    spark: SparkSession, tmp_path: Path, kind: str, step: str
) -> None:
    """One table in SQL beside one without, in batches of whole transactions."""
    journal, orders = Journal.create(tmp_path / "journal"), shop_table("orders", 16_400)
    journal.register(orders)
    journal.register(shop_table("items", 16_401))
    shape = Shape(filters=(SqlFilter("body LIKE '%1'", ("public.orders",)),))
    options = {"path": str(tmp_path / "copy.db")} if kind == "sqlite" else {}
    bench = Bench(spark, tmp_path, journal, kind=kind, options=options, shape=shape)
    for number in range(4):
        rows = [("public.orders", number * 10 + at, f"{number}-{at}") for at in range(10)]
        journal.transaction([*rows, ("public.items", number, "an item")])
    journal.append(orders, [update(["1", "left"]), update(["12", "entered 1"]), delete(key=["21", None])])
    kills = tmp_path / "kills"
    kills.mkdir()
    limits = BatchLimits(max_ms=0, max_bytes=1 << 30, max_events=30)
    query = bench.query(once=True, limits=limits, wrap=lambda target: Killed(target, step, kills))
    query.start()
    assert query.wait(120)
    assert (query.state, query.error) == (StreamState.STOPPED, None)
    assert f"{step}.fired" in {path.name for path in kills.iterdir()}
    if kind == "sqlite":
        with closing(sqlite3.connect(tmp_path / "copy.db")) as db:
            found = dict(db.execute('SELECT id, body FROM "public.orders"').fetchall())
            assert db.execute('SELECT count(*) FROM "public.items"').fetchone() == (4,)
        assert found == {11: "1-1", 31: "3-1", 12: "entered 1"}
    else:
        names = [file["path"] for commit in bench.commits() for file in commit["files"]]
        assert sorted(names) == sorted(str(path.relative_to(bench.log)) for path in bench.log.glob("public.*/*"))
        tables = [pq.read_table(path, partitioning=None) for path in bench.log.glob("public.orders/*")]
        changes = pa.concat_tables(tables).sort_by("_ms_seq")
        seen = zip(*(changes[name].to_pylist() for name in ("_ms_op", "id", "body")), strict=True)
        assert list(seen) == [
            *[("c", number * 10 + 1, f"{number}-1") for number in range(4)],
            *[("d", 1, None), ("u", 12, "entered 1"), ("d", 21, None)],
        ]
    batches = bench.watching.of("delivery.batch")
    assert sum(batch.fields["rows"] + batch.fields["skipped"] for batch in batches) == journal.last_seq
    bench.close()
