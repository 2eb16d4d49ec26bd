"""What Spark makes of the SQL and Python of a stream, asked before a row is read.

Only what works row by row can be done to changes: aggregates, windows, subqueries and generators are refused, and so
is chance in a filter, by which a row would be inside and outside at once.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.errors import AnalysisException, PySparkException
from pyspark.logger import PySparkLogger
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_type
from pyspark.sql.types import BooleanType, StructType

from millstream.errors import ConfigError
from millstream.spark.session import active_session, build_session
from millstream.transforms.sql import Output
from millstream.transforms.steps import Columns

IDENTITY = ("_ms_seq", "_ms_event_id", "_ms_image")
"""What a user's function must leave in its rows: which row of which change each is."""

_BY_ROW = "only what works row by row can be done to changes"


class SparkAnalyst:
    """See `transforms.sql.Analyst`. `spark` gives the session when it is first needed."""

    def __init__(self, spark: Callable[[], SparkSession]) -> None:
        self._spark = spark

    def __call__(self, verb: str, texts: Sequence[tuple[str, Any]], columns: Columns) -> tuple[Output, ...]:
        said = {"add_sql": "add"}.get(verb, verb)
        try:
            with quiet():
                return self._outputs(verb, texts, columns)
        except PySparkException as wrong:
            raise _wrong(wrong, said, columns) from None
        except ConfigError as wrong:
            raise ConfigError(f"{said}: {columns.table}: {wrong.message}", hint=wrong.hint) from None

    def _outputs(self, verb: str, texts: Sequence[tuple[str, Any]], columns: Columns) -> tuple[Output, ...]:
        fields = [pa.field(name, kind) for name, (kind, _) in columns.fields.items()]
        if verb == "python":
            return self._python(texts[0][0], fields)
        rows = self._spark().createDataFrame([], _struct(fields))
        if verb == "filter":
            return (self._filter(rows, texts[0][0]),)
        if verb == "add_sql":
            return tuple(_of(rows.select(F.expr(sql).alias(name)))[0] for name, sql in texts)
        return tuple(_of(rows.select(*[F.expr(sql) for sql, _ in expanded(texts, list(columns.fields))])))

    def _filter(self, rows: DataFrame, condition: str) -> Output:
        made = rows.select(F.expr(condition).alias("condition"))
        if not isinstance(made.schema[0].dataType, BooleanType):
            raise ConfigError(f"the filter gives {made.schema[0].dataType.simpleString()}, and not true or false")
        (output,) = _of(made)
        if not made._jdf.queryExecution().analyzed().deterministic():
            raise ConfigError("the filter depends on chance", hint="a row is inside or it is not")
        return output

    def _python(self, place: str, fields: list[pa.Field]) -> tuple[Output, ...]:
        own = [pa.field(name, kind) for name, kind in zip(IDENTITY, (pa.int64(), pa.string(), pa.int32()), strict=True)]
        made = user_function(place)(self._spark().createDataFrame([], _struct([*fields, *own])))
        if not isinstance(made, DataFrame):
            raise ConfigError(f"{place} gives no DataFrame")
        names = [field.name for field in made.schema]
        if not set(IDENTITY) <= set(names):
            raise ConfigError(
                f"{place} takes the columns {', '.join(IDENTITY)} away", hint="they must stay as they are"
            )
        known = {field.name: field.type for field in fields}
        needs = tuple(known)
        return tuple(
            Output(field.name, kind, field.name if known.get(field.name) == kind else None, needs)
            for field in made.schema
            if field.name not in IDENTITY
            for kind in [_arrow(field.dataType)]
        )


@contextmanager
def analyst() -> Iterator[SparkAnalyst]:
    """An analyst for who has no Spark: one is started when it is first asked, and ended afterwards."""
    with borrowed_session() as session:
        yield SparkAnalyst(session)


@contextmanager
def borrowed_session() -> Iterator[Callable[[], SparkSession]]:
    """Gives the session that there is, or one that is started when it is first asked for and ended afterwards."""
    ours = active_session() is None
    with tempfile.TemporaryDirectory(prefix="millstream-") as directory:
        try:
            yield lambda: build_session(Path(directory), "local[1]")
        finally:
            found = active_session()
            if ours and found is not None:
                found.stop()


@contextmanager
def quiet() -> Iterator[None]:
    """What is wrong is told by an error of ours; Spark would also print it, with a trace and perhaps a row's value."""
    logger = PySparkLogger.getLogger("SQLQueryContextLogger")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def user_function(place: str) -> Callable[[DataFrame], DataFrame]:
    """The function at `module:name`. Raises ConfigError if there is none."""
    module, _, name = place.partition(":")
    try:
        found: Callable[[DataFrame], DataFrame] = getattr(import_module(module), name)
    except ImportError as missing:
        raise ConfigError(f"{place} cannot be imported: {missing}", hint="it must be on PYTHONPATH") from None
    except AttributeError:
        raise ConfigError(f"{module} has no {name}") from None
    return found


def expanded(texts: Sequence[tuple[str, Any]], names: Sequence[str]) -> list[tuple[str, None]]:
    """Expressions with the columns that a plain * stands for."""
    found: list[str] = []
    for sql, _ in texts:
        if sql.lstrip().startswith("*") and sql.strip() != "*":
            raise ConfigError(f"`{sql}`: a star stands alone", hint="drop other columns in a step of their own")
        found += [quoted(name) for name in names] if sql.strip() == "*" else [sql]
    return [(sql, None) for sql in found]


def quoted(name: str) -> str:
    """A column's name in SQL."""
    return "`" + name.replace("`", "``") + "`"


def _of(made: DataFrame) -> list[Output]:
    """The columns of a selection over a table's columns, each with what it is computed from."""
    plan = made._jdf.queryExecution().analyzed()
    if plan.nodeName() != "Project" or not plan.child().children().isEmpty() or not plan.subqueries().isEmpty():
        raise ConfigError(f"no aggregates, windows, subqueries or generators here: {_BY_ROW}")
    outputs = []
    expressions = plan.projectList()
    for at, field in enumerate(made.schema):
        expression = expressions.apply(at)
        needs = _names(expression.references())
        inner = expression.child() if expression.nodeName() == "Alias" else expression
        source = needs[0] if inner.nodeName() == "AttributeReference" else None
        outputs.append(Output(field.name, _arrow(field.dataType), source, needs))
    twice = [one.name for one in outputs if [other.name for other in outputs].count(one.name) > 1]
    if twice:
        raise ConfigError(f"there are two columns {twice[0]}", hint="name one of them with AS")
    return outputs


def _names(references: Any) -> tuple[str, ...]:
    found = references.toSeq()
    return tuple(dict.fromkeys(found.apply(at).name() for at in range(found.size())))


def _struct(fields: Sequence[pa.Field]) -> StructType:
    return from_arrow_schema(pa.schema(fields))


def _arrow(kind: Any) -> pa.DataType:
    """The Arrow type as our own columns have it."""
    found = to_arrow_type(kind, timezone="UTC")
    if pa.types.is_list(found):
        return pa.list_(found.value_type)
    return pa.int16() if found == pa.int8() else found


def _wrong(failed: PySparkException, verb: str, columns: Columns) -> ConfigError:
    condition = failed.getCondition() or ""
    parameters = failed.getMessageParameters() or {}
    if condition.startswith("UNRESOLVED_COLUMN") and "objectName" in parameters:
        return ConfigError(
            f"{verb}: {columns.table} has no column {parameters['objectName'].replace('`', '')}",
            hint=f"it has {', '.join(columns.fields)} there; `tables` says which tables are meant",
        )
    if not isinstance(failed, AnalysisException):
        return ConfigError(f"{verb}: {columns.table}: {condition or type(failed).__name__}")
    said = re.split(r"(?:\. |\n|; line)", re.sub(r"^\[[A-Z0-9_.]+\] ", "", str(failed).strip()), maxsplit=1)[0].strip()
    return ConfigError(f"{verb}: {columns.table}: {said}")
