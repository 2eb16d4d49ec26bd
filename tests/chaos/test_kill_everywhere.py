"""Kill -9 at every durable step and at random moments; afterwards every row must be right."""

from __future__ import annotations

import os
import random
import signal
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from millstream.demo.watch import Sight
from tests.chaos.rig import Rig, failpoints, kill
from tests.fixtures.postgres import Database

pytestmark = [pytest.mark.chaos, pytest.mark.postgres, pytest.mark.spark, pytest.mark.timeout(1200)]

ROUNDS = int(os.environ.get("MILLSTREAM_CHAOS_ROUNDS", "0"))
EACH = os.environ.get("MILLSTREAM_CHAOS_EACH") == "1"

ELSEWHERE = {
    "journal.superseded_dropped": "tests/unit/journal/test_journal_kills.py",
    # The chaos stream's source never moves to another server.
    "journal.bound": "tests/unit/journal/test_journal_kills.py",
    # Only a catch-up commits so many rows at once that a whole segment is in long runs.
    "journal.adopted": "tests/unit/journal/test_journal_kills.py",
    # A journal is created once: who is killed here never comes to capture.journal_created.
    "journal.created": "tests/unit/journal/test_journal_kills.py",
    # The same, and a line is written when a table's schema changes, which the chaos stream's do not.
    "journal.schemas_made": "tests/unit/journal/test_journal_kills.py",
    "journal.schema_written": "tests/unit/journal/test_journal_kills.py",
    # The chaos stream has no limits: it is proved by all of its journal.
    "retention.decided": "tests/unit/journal/test_journal_kills.py",
    "retention.manifest_published": "tests/unit/journal/test_journal_kills.py",
    "retention.segment_removed": "tests/unit/journal/test_journal_kills.py",
    # The chaos stream asks for no trigger.
    "capture.trigger_installed": "tests/integration/test_capture_process.py",
    "journal.told_written": "tests/unit/journal/test_journal_kills.py",
    # The chaos stream begins with the first change.
    **dict.fromkeys(
        (
            *("snapshot.exported", "snapshot.barrier_passed", "snapshot.rows_decoded", "snapshot.chunk_staged"),
            *("snapshot.staged", "snapshot.published"),
        ),
        "tests/integration/test_baseline_kills.py",
    ),
    # The chaos stream delivers to files.
    **dict.fromkeys(
        (
            *("delta.read", "delta.table_committed", "delta.baseline_part_committed", "delta.written"),
            "delta.committed",
        ),
        "tests/integration/test_delta.py",
    ),
    "delta.columns_rewritten": "tests/unit/test_evolving.py",
    **dict.fromkeys(("delta.history_merged", "delta.history_ended"), "tests/integration/test_delta_history.py"),
    **dict.fromkeys(
        ("lane.opened", "lane.claimed", "lane.written", "lane.committed"), "tests/integration/test_delivery_kills.py"
    ),
    # A step of baselines.
    "lane.loaded": "tests/integration/test_baseline_kills.py",
    # Nobody asks for anything once more there.
    **dict.fromkeys(
        (
            *("replay.begun", "replay.delivered", "replay.saved", "replay.finished"),
            *("replay.lane_written", "replay.lane_committed"),
            *("replay.changelog_committed", "replay.mirror_committed", "replay.buried", "replay.tables_committed"),
            *("replay.files_renamed", "replay.files_committed"),
        ),
        "tests/unit/test_replay_kills.py",
    ),
    # Nor for a copy of a table.
    **{name: "tests/integration/test_reload_kills.py" for name in failpoints() if name.startswith("reload.")},
    "reload.skipped": "tests/integration/test_journal_limit.py",
    # Nobody plants differences in what the chaos stream delivers.
    **dict.fromkeys(
        ("repair.written", "repair.committed", "repair.table_committed"), "tests/integration/test_verify_forms.py"
    ),
    # Nobody keeps the state of what the chaos stream delivers to.
    **{name: "tests/unit/test_snapshot_kills.py" for name in failpoints() if name.startswith(("keep.", "restore."))},
    # Only a capture that is far behind comes here.
    **{name: "tests/integration/test_bulk_kills.py" for name in failpoints() if name.startswith("bulk.")},
    # The chaos stream has the protocol in which transactions come when they have committed.
    **dict.fromkeys(("streamed.kept", "streamed.released"), "tests/integration/test_streamed.py"),
    # The directory that the chaos stream delivers to takes everything.
    **dict.fromkeys(
        ("state.letters_added", "letters.recorded", "letters.redelivered", "state.letters_removed"),
        "tests/integration/test_letter_kills.py",
    ),
    **dict.fromkeys(("state.doubts_added", "state.doubts_set"), "tests/unit/test_doubts.py"),
    # The chaos journal has no limit.
    "state.reload_saved": "tests/conformance/test_state_sqlite.py",
    # Nobody changes the chaos stream while it runs, or replays it.
    "files.rewound": "tests/unit/test_engine_kills.py",
    # The chaos stream's tables keep their columns, and are not written anew.
    "catalog.receipt_saved": "tests/unit/test_following.py",
    "delivery.gate_reached": "tests/unit/test_engine_kills.py",
    "state.ddl_decided": "tests/unit/test_engine_kills.py",
    **{name: "tests/unit/test_engine_kills.py" for name in failpoints() if name.startswith("engine.")},
}
"""Failpoints that a plain stream never passes, and the test that kills there instead."""

LARGE = {"capture.spooled", "journal.flushed", "journal.rolled_inside", "journal.part_named"}
"""Steps that only a transaction larger than memory allows for passes."""

PATIENCE = 700.0

PAUSE = 0.002 if EACH else 0.02
"""Seconds between two transactions of the load: the short form has both cores for starting again."""

SHORT = {
    *("capture.slot_created", "capture.committed", "capture.acked", "capture.spooled"),
    *("journal.synced", "journal.head_published", "journal.rolled_inside"),
    *("stage.slice_decoded", "delivery.published"),
}
"""Where the short form kills: in each of the processes, before and after what others rely on is durable. `make chaos`
kills at every step. Without Spark, and by content too, that is done at the steps of capture by
`tests/integration/test_capture_process.py`, of the journal by `tests/unit/journal/test_journal_kills.py`, of delivery
by `tests/integration/test_delivery_kills.py`."""


def reachable() -> list[str]:
    return [name for name in failpoints() if name not in ELSEWHERE]


def armed_together() -> list[str]:
    """Where one run is killed: at every step, or in the short form at some."""
    return [name for name in reachable() if EACH or name in SHORT]


def test_failpoint_names_are_unique() -> None:
    names = failpoints()
    assert len(names) == len(set(names))
    assert len(names) >= 20
    assert set(ELSEWHERE) | SHORT <= set(names), "a stale exception"
    assert not SHORT & set(ELSEWHERE)


def run_until_fired(
    rig: Rig, names: list[str], state: Path, armed: str, then: Callable[[], None] = lambda: None
) -> None:
    """Trade and let the engine die and come back until each of the failpoints has killed once, and `then`."""
    environment = {
        "MILLSTREAM_FAILPOINT": armed,
        "MILLSTREAM_FAILPOINT_STATE": str(state),
        "MILLSTREAM_SEGMENT_BYTES": str(1 << 20),
    }
    rig.open(environment)

    def missing() -> list[str]:
        return [name for name in names if not (state / f"{name}.fired").exists()]

    def all_fired(_: Sight) -> bool:
        if any(name in LARGE for name in missing()):
            rig.one_large_transaction()
        return not missing()

    with rig.trading(PAUSE):
        try:
            rig.await_sight(all_fired, "all kills", environment, PATIENCE)
        except AssertionError as late:
            raise AssertionError(f"never killed at {missing()}") from late
        # Life must go on after the last kill, with the same processes.
        seen = rig.watch.look().delivered
        rig.await_sight(lambda sight: sight.delivered > seen, "delivery after the last kill", environment)
        then()


def test_kills_at_durable_steps_lose_and_double_nothing(tmp_path: Path, database: Database) -> None:
    names = armed_together()
    state = tmp_path / "fired"
    state.mkdir()
    rng = random.Random(7)
    # Steps of the very beginning are passed once; the others at least a few times, so die in the middle.
    armed = ",".join(f"{name}:{1 if once(name) else rng.randint(2, 3)}" for name in names)
    # Creating a journal recovers it too: the first kill must be left for the step after that.
    armed = armed.replace("journal.recovered:1", "journal.recovered:2")
    with Rig(tmp_path, database, seed=7) as rig:

        def lose_the_server() -> None:
            rig.expect_outages()
            strike(rig, database, "postgres", rng)
            delivered = rig.watch.look().delivered
            rig.await_sight(lambda sight: sight.delivered > delivered + 1000, "delivery from the new server")

        run_until_fired(rig, names, state, armed, lose_the_server)
        rig.drain()
        rig.prove()


def once(name: str) -> bool:
    """Steps that a stream passes only once, or only when it starts."""
    return name.rpartition(".")[2] in {
        "created", "publication_created", "slot_created", "journal_created", "epoch_opened", "recovered",
        "relation_written", "seal_written", "manifest_published", "rolled", "rolled_inside", "part_named",
        "flushed", "spooled", "replication_started",
    }  # fmt: skip


@pytest.mark.skipif(not EACH, reason="one engine per failpoint takes long: `make chaos` runs it")
@pytest.mark.parametrize("name", reachable())
def test_a_kill_at_one_step_alone(tmp_path: Path, database: Database, name: str) -> None:
    state = tmp_path / "fired"
    state.mkdir()
    with Rig(tmp_path, database, seed=zlib.crc32(name.encode())) as rig:
        run_until_fired(rig, [name], state, f"{name}:{1 if once(name) else 3}")
        rig.drain()
        rig.prove()


@pytest.mark.skipif(ROUNDS == 0, reason="takes minutes: `make chaos` runs it")
def test_random_kills_lose_and_double_nothing(
    tmp_path: Path, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = int(os.environ.get("MILLSTREAM_CHAOS_SEED") or random.SystemRandom().randrange(1 << 31))
    with capsys.disabled():
        print(f"\nchaos: seed {seed}, {ROUNDS} rounds (again with MILLSTREAM_CHAOS_SEED={seed})")
    rng = random.Random(seed)
    victims = [*rng.sample(["capture", "driver", "worker", "postgres"], 4)] * (ROUNDS // 4 + 1)
    with Rig(tmp_path, database, seed) as rig:
        rig.expect_outages()
        rig.open()
        with rig.trading():
            for kind in victims[:ROUNDS]:
                strike(rig, database, kind, rng)
            delivered = rig.watch.look().delivered
            rig.await_sight(lambda sight: sight.delivered > delivered + 1000, "delivery after the last kill")
        rig.drain(by=signal.SIGINT)
        rig.prove()


def strike(rig: Rig, database: Database, kind: str, rng: random.Random) -> None:
    """Wait for a batch, then for a random moment, then kill."""
    delivered = rig.watch.look().delivered
    rig.await_sight(lambda sight: sight.delivered > delivered, f"delivery before the kill of {kind}")
    threading.Event().wait(rng.uniform(0.0, 1.5))
    if kind == "postgres":
        database.server.kill()
        database.server.start()
    elif (pid := rig.victim(kind)) is not None:
        kill(pid)
