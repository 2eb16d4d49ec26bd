"""The same stream, unchanged, on clusters of real executor processes; and executors that die or see nothing."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from pathlib import Path

import pytest

from tests.chaos.rig import Rig
from tests.fixtures.cluster import StandaloneCluster, kill_group
from tests.fixtures.postgres import Database

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.timeout(400)]

HERE = {"SPARK_LOCAL_IP": "127.0.0.1"}
"""What a driver needs when the cluster is on this host and the host cannot resolve its own name."""


def run_once(rig: Rig, master: str) -> None:
    rig.engine.start("--once", "--quiet", "--master", master, environment=HERE)
    assert rig.engine.wait(240) == 0, rig.log_tail()


def fill(rig: Rig) -> None:
    """Tables and a journal first, then the rows that shall be delivered."""
    rig.shop.create()
    run_once(rig, "local[2,4]")
    rig.shop.open_doors()
    rig.database.sql("INSERT INTO visits SELECT i, repeat('a visit ', 20) FROM generate_series(1, 5000) i")


def test_a_stream_goes_on_from_master_to_master_and_survives_its_executors(tmp_path: Path, database: Database) -> None:
    with Rig(tmp_path, database, seed=11) as rig, StandaloneCluster(tmp_path) as cluster:
        fill(rig)
        run_once(rig, "local-cluster[2,1,1024]")
        assert rig.watch.look().delivered > 5000
        first, second = cluster.add_worker("one"), cluster.add_worker("two")
        with rig.trading():
            rig.engine.start("--quiet", "--master", cluster.url, environment=HERE)
            delivering(rig)
            # An executor dies in the middle of batches: its worker starts another.
            (pid,) = cluster.executors(second)
            os.kill(pid, signal.SIGKILL)
            delivering(rig)
            # A worker is lost, with its executor.
            kill_group(first)
            delivering(rig)
            assert rig.engine.running, rig.log_tail()
            assert rig.engine.stop() == 0, rig.log_tail()
        run_once(rig, cluster.url)
        rig.prove()


def delivering(rig: Rig) -> None:
    delivered = rig.watch.look().delivered
    rig.await_sight(lambda sight: sight.delivered > delivered + 200, "delivery on the cluster", seconds=120)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="a mount namespace needs root and unshare")
def test_a_worker_that_cannot_see_the_journal_is_named(tmp_path: Path, database: Database) -> None:
    with Rig(tmp_path, database, seed=12) as rig, StandaloneCluster(tmp_path) as cluster:
        fill(rig)
        before = rig.watch.look().delivered
        hidden = rig.home.path / "journals"
        assert hidden.is_dir()
        script = f'mount -t tmpfs none {shlex.quote(str(hidden))} && exec "$@"'
        cluster.add_worker("blind", behind=["unshare", "--mount", "sh", "-c", script, "sh"])
        rig.engine.start("--once", "--quiet", "--master", cluster.url, environment={**HERE, "COLUMNS": "1000"})
        assert rig.engine.wait(200) == 1, rig.log_tail()
        said = rig.log_tail()
        (error,) = [line for line in said.splitlines() if line.startswith("error:")]
        assert "cannot read the journal at" in error
        assert str(tmp_path / "blind") in error, "which executor"
        assert "Traceback" not in said
        assert rig.watch.look().delivered == before
        # With a worker that sees everything the same stream goes on, and nothing is missing.
        kill_group(cluster.workers[0])
        cluster.add_worker("seeing")
        run_once(rig, cluster.url)
        rig.prove()
