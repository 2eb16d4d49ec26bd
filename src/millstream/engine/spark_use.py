"""The Spark session of an engine: the process's own if it has one, else one that is started when first needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from millstream.engine.home import Home
from millstream.observe import Observers
from millstream.spark.session import active_session, build_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkUse:
    """Only the thread that starts deliveries asks for the session."""

    def __init__(
        self,
        home: Home,
        master: str | None,
        conf: Mapping[str, str],
        observers: Observers,
        on_started: Callable[[], None] = lambda: None,
    ) -> None:
        self._home = home
        self._master = master
        self._conf = conf
        self._observers = observers
        self._on_started = on_started
        self._session: SparkSession | None = None
        self._ours = False
        """False when the caller had a session already: then it is used, and left running."""

    def session(self) -> SparkSession:
        """The session; started now if there is none."""
        if self._session is None:
            found = active_session()
            self._session = build_session(
                self._home.spark_path, self._master, extra_conf=self._conf, observer=self._observers
            )
            self._ours = found is None
            self._on_started()
        return self._session

    def stop(self) -> None:
        """End the session if it was started here."""
        session, self._session = self._session, None
        if session is not None and self._ours:
            session.stop()
