"""What a delivery makes of errors: ours, Spark's, and those of strangers."""

from __future__ import annotations

from py4j.protocol import Py4JError
from pyspark.errors import PythonException
from pyspark.sql import SparkSession

from millstream.errors import MillstreamError, SparkEnded, TargetError


def is_transient(failed: Exception) -> bool:
    """Our errors say it themselves. What Spark reports is a lost worker or executor, since a task names its own
    errors; only a task that could not even begin gives a PythonException, and it never will begin."""
    if isinstance(failed, MillstreamError):
        return failed.transient
    return not isinstance(failed, PythonException) and "PythonException" not in str(failed)


def unexpected(defect: Exception | None) -> TargetError:
    """A stranger's error as ours, by its class alone: its words may hold a user's values."""
    return TargetError(f"delivery ended: {kind_of(defect)}", hint="see spark.log in the home's spark directory")


def ended_by(spark: SparkSession, defect: Exception) -> MillstreamError:
    """Why a delivery has ended that a stranger's error has ended: because Spark has, or for that error."""
    try:
        check_spark(spark, defect)
    except SparkEnded as ended:
        return ended
    return unexpected(defect)


def kind_of(failure: Exception | None) -> str:
    """A stranger's error by its class alone: its words may hold a user's values."""
    return "the query ended" if failure is None else f"Spark reported {type(failure).__name__}"


def check_spark(spark: SparkSession, failure: Exception | None) -> None:
    """Raise SparkEnded for a session whose JVM is gone: it cannot be retried on."""
    try:
        stopped = spark.sparkContext._jsc is None or spark.sparkContext._jsc.sc().isStopped()
    except (Py4JError, OSError):
        # Py4J hands on what the socket says when nobody listens any more.
        stopped = True
    if stopped:
        hint = "start it again; spark.log in the home's spark directory may say why"
        raise SparkEnded("Spark has ended, and with it all deliveries", hint=hint) from failure
