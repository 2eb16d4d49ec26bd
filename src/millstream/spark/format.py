"""`spark.read.format("millstream")` and `spark.readStream.format("millstream")`: changes as DataFrames.

Only the shell that Spark holds; docs/spark.md is the user's page. Spark makes one of these for each
`load()`, in a process of its own, and pickles it to all others: to the one that plans a query and to
the tasks. What it reads is therefore settled when it is made. Spark imports this module to find out
its name, whatever is read: everything heavy is imported where it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from millstream.errors import ConfigError, MillstreamError
from millstream.spark.format_options import FormatOptions

if TYPE_CHECKING:
    from millstream.spark.reading import Reading

FORMAT = "millstream"

_READ_ONLY = ConfigError("the format millstream only reads", hint="changes get into a journal by `millstream run`")


class ChangesSource(DataSource):
    """The changes of one table, typed, or those of all tables in an envelope."""

    def __init__(self, options: dict[str, str]) -> None:
        from millstream.spark.reading import settle

        super().__init__(options)
        self._settled: Reading | MillstreamError
        try:
            self._settled = settle(FormatOptions.parse(options))
        except MillstreamError as refused:
            # Told when something is to be read: who wants to write here shall hear that, not what an option lacks.
            self._settled = refused

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        """The table's newest columns. Not asked for when the user gives a schema, which then is what is read."""
        from millstream.spark.reading import newest_schema

        self._settled, found = newest_schema(self._reading())
        return found

    def reader(self, schema: StructType) -> DataSourceReader:
        from millstream.spark.format_readers import ChangesReader

        return ChangesReader(self._reading(), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from millstream.spark.format_readers import ChangesStreamReader

        return ChangesStreamReader(self._reading(), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        raise _READ_ONLY

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        raise _READ_ONLY

    def _reading(self) -> Reading:
        if isinstance(self._settled, MillstreamError):
            raise self._settled
        return self._settled
