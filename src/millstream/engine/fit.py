"""What is fit for a delivery, and what is not: targets as a program, or an older version, describes them; executors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import ValidationError

from millstream import targets
from millstream.errors import ConfigError
from millstream.journal import JournalReader
from millstream.model import TargetSpec
from millstream.observe import Event, Observer, counted
from millstream.targets.base import Target

if TYPE_CHECKING:
    # It is not loaded for who only checks targets.
    from pyspark.sql import SparkSession


def open_target(spec: TargetSpec) -> Target:
    """As `targets.open_target`; options that are wrong are a ConfigError too, without their values."""
    try:
        return targets.open_target(spec)
    except ValidationError as wrong:
        said = "; ".join(
            f"{'.'.join(str(part) for part in error['loc'])}: {error['msg']}"
            for error in wrong.errors(include_input=False, include_url=False)
        )
        raise ConfigError(f"target {spec.name}: {said}") from None


def tell_executors(spark: SparkSession, locations: Sequence[str], observer: Observer) -> None:
    """Look whether the executors can deliver from the journal there, if there is one. Raises ExecutorUnfit."""
    from millstream.spark.probe import Needed, look_at_executors

    journals = {tuple(locations): JournalReader(list(locations)).header().journal_id} if locations else {}
    found = look_at_executors(spark, Needed.here(journals))
    hosts = sorted({executor.host for executor in found})
    message = f"{counted(len(found), 'executor')} on {', '.join(hosts)} fit for delivery"
    fields = {"executors": len(found), "hosts": hosts}
    observer.on_event(Event("spark.executors_fit", message, fields=fields))
