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

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.timeout(500)]

WHOLE = os.environ.get("MILLSTREAM_CLUSTER") == "1"

HERE = {"SPARK_LOCAL_IP": "127.0.0.1", "COLUMNS": "1000"}
"""What a driver needs when the cluster is on this host and the host cannot resolve its own name; and long lines."""


def run_once(rig: Rig, master: str) -> int:
    rig.engine.start("--once", "--quiet", "--master", master, environment=HERE)
    return rig.engine.wait(240)


@pytest.mark.skipif(not WHOLE, reason="two more Java processes take a minute: `make cluster` runs it")
def test_two_executor_processes_deliver_the_same_stream(tmp_path: Path, database: Database) -> None:
    """The short form: begun on one machine's threads, gone on with on executors of their own."""
    with Rig(tmp_path, database, seed=13) as rig:
        fill(rig)
        assert run_once(rig, "local-cluster[2,1,1024]") == 0, rig.log_tail()
        rig.prove()


@pytest.mark.skipif(not WHOLE, reason="master, workers and their deaths take minutes: `make cluster` runs it")
def test_a_stream_goes_from_master_to_master_and_survives_its_executors(
    tmp_path: Path, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    """One stream and one home all the way: local, a standalone cluster, local-cluster."""
    with Rig(tmp_path, database, seed=11) as rig, StandaloneCluster(tmp_path) as cluster:
        fill(rig)
        if os.geteuid() == 0 and shutil.which("unshare"):
            a_worker_that_cannot_see_the_journal_is_named(rig, cluster)
        else:
            with capsys.disabled():
                print(
                    "\nnot tried here: a worker that cannot see the journal (a mount namespace needs root and unshare)"
                )
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
        assert run_once(rig, "local-cluster[2,1,1024]") == 0, rig.log_tail()
        rig.prove()


def fill(rig: Rig) -> None:
    """Tables and a journal first, then the rows that shall be delivered."""
    rig.shop.create()
    assert run_once(rig, "local[2,4]") == 0, rig.log_tail()
    rig.shop.open_doors()
    rig.database.sql("INSERT INTO visits SELECT i, repeat('a visit ', 20) FROM generate_series(1, 5000) i")


def delivering(rig: Rig) -> None:
    delivered = rig.watch.look().delivered
    rig.await_sight(lambda sight: sight.delivered > delivered + 200, "delivery on the cluster", seconds=120)


def a_worker_that_cannot_see_the_journal_is_named(rig: Rig, cluster: StandaloneCluster) -> None:
    before = rig.watch.look().delivered
    hidden = rig.home.path / "journals"
    assert hidden.is_dir()
    script = f'mount -t tmpfs none {shlex.quote(str(hidden))} && exec "$@"'
    blind = cluster.add_worker("blind", behind=["unshare", "--mount", "sh", "-c", script, "sh"])
    assert run_once(rig, cluster.url) == 1, rig.log_tail()
    said = rig.log_tail()
    (error,) = [line for line in said.splitlines() if line.startswith("error:")]
    assert "cannot read the journal at" in error
    assert str(cluster.directory / "blind") in error, "which executor"
    assert "Traceback" not in said
    assert rig.watch.look().delivered == before
    kill_group(blind)
