"""Taking back what capture made on a source: the slot, which would hold log for ever, the publications, a trigger."""

from __future__ import annotations

import threading
import time

from psycopg import sql

from millstream.errors import SourceUnavailable
from millstream.model import SourceSpec
from millstream.sources.postgres import ddl_trigger
from millstream.sources.postgres.connection import connect, translated
from millstream.sources.postgres.membership import read_publications
from millstream.sources.postgres.options import PostgresOptions
from millstream.sources.postgres.slot import drop_slot

PATIENCE = 10.0
"""Seconds that the server may take to notice that the capture which used the slot has ended."""


def remove(spec: SourceSpec) -> None:
    """Drop the slot, the DDL trigger and those publications that Millstream made. What is not there is not missed.

    Raises SourceUnavailable when the server cannot be reached, or somebody still reads from the slot.
    """
    options = PostgresOptions.of(spec)
    pause, deadline = threading.Event(), time.monotonic() + PATIENCE
    with connect(spec, options) as conn:
        while True:
            try:
                drop_slot(conn, options.slot)
                break
            except SourceUnavailable:
                if time.monotonic() >= deadline:
                    raise
                pause.wait(0.1)
        ddl_trigger.remove(conn, options)
        for publication in read_publications(conn, options.publications).values():
            if publication.ours and publication.owned:
                with translated("dropping a publication"):
                    conn.execute(sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(publication.name)))
