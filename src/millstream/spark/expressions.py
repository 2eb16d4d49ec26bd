"""A stream's SQL over the images of a table (`images`), and everything that comes before and after it.

SQL is asked only about rows that are there and inside the filters: of a deleted row, or an old one, often nothing but
the key is known, and an expression may fail on the NULLs that stand for the rest.

Normally an expression that fails on a row ends the job, and nobody knows which row it was. When that is to be found
out (`isolate`), every expression is tried: what fails is noted on the image (`_ms_note`), which passes by all that
follows. That costs, so it is done only for a batch that has failed.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from millstream.spark.analysis import expanded, quoted
from millstream.spark.functions import applied, whole_rows
from millstream.spark.images import NEW, OWN, Binding, arrow_part, image_schema, last_done, source_columns
from millstream.spark.packed import PACKED_DDL, pack
from millstream.transforms.compiled import Compiled
from millstream.transforms.sql import Output, SqlStep

_TRIED = "_ms_tried"


def packed_frame(
    images: DataFrame, binding: Binding, relation_id: int, *, isolate: bool = False, skip: bool = False
) -> DataFrame:
    """The images of a table, filtered, transformed and packed. `isolate`, `skip`: as a `Joiner` has them."""
    bound = binding.bound()
    if bound.conditions:
        images = _filtered(images, bound, isolate)
    begin = 0
    for at, part in enumerate(bound.parts):
        if not isinstance(part, SqlStep):
            continue
        if at > begin or last_done(bound, begin) is not None:
            stepped = arrow_part(binding, begin, at, isolate=isolate)
            images = images.mapInArrow(stepped, from_arrow_schema(image_schema(part.before)))
        if part.step.verb == "python":
            images = applied(images, binding, at)
        else:
            images = _selected(images, part, whole_rows(bound.rule.whole), isolate)
        begin = at + 1
    return images.mapInArrow(pack(binding, relation_id, begin, isolate=isolate, skip=skip), PACKED_DDL)


def _filtered(images: DataFrame, bound: Compiled, isolate: bool) -> DataFrame:
    """Which images are inside; of the others only the key goes on, so that no SQL ever sees the rest."""
    names = [name for name, _ in source_columns(bound)]
    asked = (F.col("_ms_image") == NEW) & F.col("_ms_op").isin("c", "r", "u")
    if bound.rule.knows_old:
        asked = asked | (F.col("_ms_image") != NEW)
    asked = asked & F.col("_ms_in")
    if isolate:
        images = _noted(
            images, [(sql, f"{bound.source.table}: a filter fails on it", asked) for sql in bound.conditions]
        )
        answers = _results(images, len(bound.conditions))
        asked = asked & F.col("_ms_note").isNull()
    else:
        answers = [F.expr(condition) for condition in bound.conditions]
    inside = F.lit(True)
    for answer in answers:
        inside = inside & F.coalesce(answer, F.lit(False))
    tested = images.withColumn("_ms_in", F.when(asked, inside).otherwise(F.lit(False)))
    kept = [
        F.col(quoted(name)) if name in bound.rule.key else F.when(F.col("_ms_in"), F.col(quoted(name))).alias(name)
        for name in names
    ]
    own = {"_ms_special": _of_key("_ms_special", bound.rule.key), "_ms_unknown": _of_key("_ms_unknown", bound.rule.key)}
    return tested.select(*kept, *[own.get(name, F.col(name)) for name in OWN.names])


def _of_key(name: str, key: frozenset[str]) -> Column:
    """What is said of a row's columns; of a row outside the filters what is said of the key's."""

    def known(column: Column) -> Column:
        return column.isin(*key) if key else F.lit(False)

    left = F.map_filter(name, lambda column, _: known(column)) if name == "_ms_special" else F.filter(name, known)
    return F.when(F.col("_ms_in"), F.col(name)).otherwise(left).alias(name)


def _selected(images: DataFrame, part: SqlStep, asked: Column, isolate: bool) -> DataFrame:
    names = [name for name, _ in part.before]
    adds = part.step.verb == "add_sql"
    texts = (
        [sql for _, sql in part.step.arguments] if adds else [sql for sql, _ in expanded(part.step.arguments, names)]
    )
    made = [F.col(quoted(name)) for name in names] if adds else []
    computed = [sql for sql, output in zip(texts, part.outputs, strict=True) if output.source is None]
    known = {one.name: asked & _sent(one) for one in part.outputs}
    if isolate:
        verb = "add" if adds else part.step.verb
        wrong = [
            (f"{part.table}.{one.name}: {verb} fails on it", known[one.name])
            for one in part.outputs
            if one.source is None
        ]
        images = _noted(images, [(sql, *said) for sql, said in zip(computed, wrong, strict=True)])
        known = {name: mask & F.col("_ms_note").isNull() for name, mask in known.items()}
        tried = iter(_results(images, len(computed)))
    else:
        tried = iter([F.expr(sql) for sql in computed])
    for sql, output in zip(texts, part.outputs, strict=True):
        found = F.expr(sql) if output.source is not None else F.when(known[output.name], next(tried))
        made.append(found.alias(output.name))
    return images.select(*made, *OWN.names)


def _sent(output: Output) -> Column:
    """Whether what it is computed from was sent: all of it, since rows that lack a part are asked nothing."""
    if not output.needs:
        return F.lit(True)
    return ~F.arrays_overlap("_ms_unknown", F.array(*[F.lit(name) for name in output.needs]))


def _noted(images: DataFrame, expressions: Sequence[tuple[str, str, Column]]) -> DataFrame:
    """The images with the results of expressions, each in a struct, and a note where one of them fails.

    An expression comes with what to note, and with the rows that it is asked about.
    """
    note, inside = F.col("_ms_note"), F.col("_ms_in")
    for at, (sql, wrong, asked) in enumerate(expressions):
        # Under a condition, lest Spark takes what two of them have in common out of both, and fails there.
        images = images.withColumn(f"{_TRIED}{at}", F.when(asked, _try(images.sparkSession, sql)))
        note = F.coalesce(note, F.when(asked & F.col(f"{_TRIED}{at}").isNull(), F.lit(wrong)))
    images = images.withColumn("_ms_note", note)
    # Whatever comes after it leaves such a row alone.
    return images.withColumn("_ms_in", inside & F.col("_ms_note").isNull())


def _results(images: DataFrame, count: int) -> list[Column]:
    names = [images.schema[f"{_TRIED}{at}"].dataType for at in range(count)]
    return [
        F.col(f"{_TRIED}{at}").getField(kind.names[0]) for at, kind in enumerate(names) if isinstance(kind, StructType)
    ]


def _try(spark: SparkSession, sql: str) -> Column:
    """A struct of the expression's value; NULL where it fails.

    Spark's own try_ functions are each for one function; what they are made of is for any expression.
    """
    from pyspark.sql.classic.column import Column as Classic

    jvm = spark._jvm
    assert jvm is not None  # noqa: S101 - a session without a JVM delivers nothing
    parsed = spark._jsparkSession.sessionState().sqlParser().parseExpression(f"struct({sql})")
    tried = jvm.org.apache.spark.sql.catalyst.expressions.TryEval(parsed)
    return Classic(jvm.org.apache.spark.sql.classic.ExpressionUtils.column(tried))


def first_schema(binding: Binding) -> StructType:
    """What images of the table are before anything is done to them."""
    return from_arrow_schema(image_schema(source_columns(binding.bound())))
