"""Schema changes that are not simply applied: delivery waits before them, until somebody decides."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from millstream import Engine, StreamState
from millstream.cli.app import app
from millstream.errors import ConfigError
from millstream.registry.ddl import policy_of
from millstream.registry.kinds import Kind, Policy
from millstream.registry.structure import Change
from millstream.testing import Script
from tests.fixtures.delivery import Watching
from tests.fixtures.engines import await_that, delivered, stream

COLUMNS = {"id": "integer", "note": "text"}


def alter(script: Script, **columns: str) -> None:
    script.table("public.orders", {**COLUMNS, **columns}, key=["id"])


def fill(script: Script) -> None:
    """Two rows, a transaction whose last row has a new schema, and one more row under it."""
    script.insert("public.orders", id=1, note="first")
    script.insert("public.items", id=10, note="nut")
    with script.transaction() as changes:
        changes.insert("public.items", id=11, note="bolt")
        alter(script, size="text")
        changes.insert("public.orders", id=2, note="second", size="s")
    script.insert("public.orders", id=3, note="third", size="m")


BEFORE = {"public.items": [(10, "nut")], "public.orders": [(1, "first")]}
AFTER = {"public.items": [(10, "nut"), (11, "bolt")], "public.orders": [(1, "first"), (2, "second"), (3, "third")]}


def gated(engine: Engine, script: Script, root: Path, policy: str = "gate", targets: str = "log copy") -> None:
    engine.start()
    engine.upsert_stream(replace(stream(script, root, targets=targets), ddl=(("add_column", policy),)))
    engine.await_ready("shop", 120)


def is_gated(engine: Engine) -> bool:
    status = engine.get_status("shop")
    return [status.state, *(target.state for target in status.targets)] == [StreamState.GATED] * 3


def test_delivery_waits_before_the_transaction_until_it_is_approved(
    engine: Engine, script: Script, tmp_path: Path, watching: Watching
) -> None:
    gated(engine, script, tmp_path)
    fill(script)
    await_that(lambda: is_gated(engine))
    assert delivered(tmp_path) == delivered(tmp_path, target="copy") == BEFORE
    status = engine.get_status("shop").targets[0]
    assert "version 2 of public.orders (add_column size: text) waits for approval" in str(status.error)
    assert "millstream ddl show shop 4" in str(status.hint)
    (event,) = [one for one in engine.ddl_events("shop") if one.state == "pending"]
    assert (event.id, event.policy, dict(event.receipts)) == (4, Policy.GATE, {"log": "waiting", "copy": "waiting"})
    assert event.version.checkpoint.seq == 2
    assert engine.decide_ddl("shop", 4, approved=True).state in ("approved", "applied")
    await_that(lambda: delivered(tmp_path) == delivered(tmp_path, target="copy") == AFTER)
    await_that(lambda: engine.ddl_event("shop", 4).state == "applied")
    await_that(lambda: engine.get_status("shop").targets[0].error is None)
    assert len(watching.of("delivery.gated")) == 2
    assert engine.decide_ddl("shop", 4, approved=True).state == "applied"
    with pytest.raises(ConfigError, match="applied at every target already"):
        engine.decide_ddl("shop", 4, approved=False)


@pytest.mark.parametrize("policy", ["gate", "halt"])
def test_what_is_rejected_or_halts_has_failed_until_it_is_approved(
    engine: Engine, script: Script, tmp_path: Path, policy: str
) -> None:
    gated(engine, script, tmp_path, policy, targets="log")
    fill(script)
    if policy == "gate":
        await_that(lambda: engine.get_status("shop").state is StreamState.GATED)
        assert engine.decide_ddl("shop", 4, approved=False).state == "rejected"
    await_that(lambda: engine.get_status("shop").state is StreamState.FAILED)
    said = "was rejected" if policy == "gate" else "is not to be applied"
    assert said in str(engine.get_status("shop").targets[0].error)
    assert delivered(tmp_path) == BEFORE
    engine.decide_ddl("shop", 4, approved=True)
    await_that(lambda: delivered(tmp_path) == AFTER)


def test_a_gate_holds_the_streams_own_tables_only(engine: Engine, script: Script, tmp_path: Path) -> None:
    engine.start()
    chosen = stream(script, tmp_path, "parts", tables=("public.items",))
    engine.upsert_streams([replace(chosen, ddl=(("add_column", "halt"),)), stream(script, tmp_path)])
    for name in ("parts", "shop"):
        engine.await_ready(name, 120)
    fill(script)
    await_that(lambda: delivered(tmp_path, "parts") == {"public.items": [(10, "nut"), (11, "bolt")]})
    await_that(lambda: delivered(tmp_path) == AFTER)
    assert [one.version.table for one in engine.ddl_events("parts")] == ["public.items"]


def millstream(engine: Engine, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["ddl", *arguments, "--home", str(engine.home.path)])


def test_the_command_lists_shows_and_decides(engine: Engine, script: Script, tmp_path: Path) -> None:
    gated(engine, script, tmp_path, targets="log")
    fill(script)
    await_that(lambda: engine.get_status("shop").state is StreamState.GATED)
    (pending,) = json.loads(millstream(engine, "list", "shop", "--pending", "--json").stdout)
    assert (pending["id"], pending["state"], pending["receipts"]) == (4, "pending", {"log": "waiting"})
    assert "add_column size" in millstream(engine, "list", "shop").stdout
    shown = millstream(engine, "show", "shop", "4").stdout
    assert "target log: waiting" in shown
    assert "delivered before it: up to seq 2" in shown
    assert "it passes with: millstream ddl approve shop 4" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "rejected" in millstream(engine, "reject", "shop", "4").stdout
    assert millstream(engine, "approve", "shop", "4").exit_code == 0
    await_that(lambda: delivered(tmp_path) == AFTER)
    wrong = millstream(engine, "approve", "shop", "77")
    assert wrong.exit_code == 2
    assert "no schema change 77" in wrong.stderr


def test_a_run_that_ends_at_a_rejected_change_names_it_and_what_lets_it_pass(
    engine: Engine, script: Script, tmp_path: Path
) -> None:
    gated(engine, script, tmp_path)
    fill(script)
    await_that(lambda: is_gated(engine))
    millstream(engine, "reject", "shop", "4")
    await_that(lambda: engine.get_status("shop").state is StreamState.FAILED)
    engine.stop()
    home = ["--home", str(engine.home.path)]
    ended = CliRunner().invoke(app, ["run", "--quiet", *home])
    assert ended.exit_code == 1
    said = " ".join(ended.stderr.split())
    assert "public.orders (add_column size: text) was rejected: `millstream ddl approve shop 4`" in said
    assert "run it again" in said
    assert millstream(engine, "approve", "shop", "4").exit_code == 0
    assert CliRunner().invoke(app, ["run", "--quiet", "--once", *home]).exit_code == 0
    assert delivered(tmp_path) == delivered(tmp_path, target="copy") == AFTER


def test_the_strictest_policy_counts() -> None:
    add, guess = Change(Kind.ADD_COLUMN, "a"), Change(Kind.MAYBE_RENAME_COLUMN, "b")
    assert policy_of([add], {}) is Policy.APPLY
    assert policy_of([add, guess], {}) is Policy.GATE
    assert policy_of([add, guess], {"add_column": "halt"}) is Policy.HALT
    assert policy_of([guess], {"rename_column?": "apply"}) is Policy.APPLY
