"""Random ALTERs mixed with writes: who reads behind all of them has each row under the schema it was written with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.embedded import EmbeddedPostgres
from millstream.targets.lanes import sessions
from tests.fixtures.alters import TABLES, Alterer
from tests.fixtures.capture import Oracle, drive
from tests.fixtures.mirrors import Mirrors
from tests.fixtures.plainly import assert_decoded
from tests.fixtures.postgres import Database, fresh_database

ALTERS = int(os.environ.get("MILLSTREAM_ALTERS", "12"))
SEEDS = int(os.environ.get("MILLSTREAM_ALTER_SEEDS", "1"))
"""How many ALTERs a history has, and how many histories there are; `make alters` tries a hundred in each of several."""


@pytest.fixture
def copy(postgres: EmbeddedPostgres) -> Iterator[Database]:
    with fresh_database(postgres) as made:
        yield made
        sessions.close_idle(made.uri, None)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_mirrors_that_lag_behind_all_alters_become_equal(
    database: Database, copy: Database, tmp_path: Path, seed: int
) -> None:
    with Alterer(database, seed) as alterer, drive(database, tmp_path / "spool") as capture:
        log = Oracle.beside(database)
        alterer.insert(5)
        capture.catch_up()
        for _ in range(ALTERS):
            alterer.alter()
            capture.catch_up()
        assert_decoded(capture, log)
        mirrors = Mirrors(tmp_path, copy)
        mirrors.deliver_all(capture, seed)
    for table in TABLES:
        mirrors.assert_equal(database, table)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_capture_that_lags_behind_all_alters_decodes_every_row(database: Database, tmp_path: Path, seed: int) -> None:
    with Alterer(database, seed) as alterer, drive(database, tmp_path / "spool") as capture:
        log = Oracle.beside(database)
        alterer.insert(5)
        for _ in range(ALTERS):
            alterer.alter(dense=True)
        capture.catch_up()
        assert_decoded(capture, log)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_with_the_trigger_a_capture_that_lags_behind_all_alters_makes_equal_mirrors(
    database: Database, copy: Database, tmp_path: Path, seed: int
) -> None:
    with (
        Alterer(database, seed) as alterer,
        drive(database, tmp_path / "spool", "public.*", options={"ddl_trigger": True}) as capture,
    ):
        log = Oracle.beside(database)
        alterer.insert(5)
        for number in range(ALTERS):
            alterer.alter(dense=True)
            if number == ALTERS // 2:
                # What was told is known to the next process, too: by the journal.
                capture.catch_up()
                capture.connect()
        alterer.insert(1)
        capture.catch_up()
        assert_decoded(capture, log)
        assert all(relation.enriched for relation in capture.relations)
        mirrors = Mirrors(tmp_path, copy)
        mirrors.deliver_all(capture, seed)
    for table in TABLES:
        mirrors.assert_equal(database, table)
