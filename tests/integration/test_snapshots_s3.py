"""States of targets at a server that speaks S3: taken, listed, restored, killed half-way, refused; no key is shown."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millstream import Engine, SnapshotRules
from millstream.cli.app import app
from millstream.errors import ConfigError, MillstreamError, SnapshotError, SnapshotsUnavailable
from millstream.snapshots import store
from millstream.snapshots.store import SnapshotStore
from millstream.targets import sqlite
from millstream.testing import Script
from tests.fixtures import keeping
from tests.fixtures.delivery import Watching
from tests.fixtures.engines import await_that
from tests.fixtures.forks import run
from tests.fixtures.keeping import ORDERS, deliver, rows, spec, wipe
from tests.fixtures.s3 import KEY, SECRET, Bucket
from tests.fixtures.tuples import Change, insert, update
from tests.fixtures.tuples import delete as removed
from tests.unit.test_snapshots import copied, shop

PAGE = Path(__file__).parents[2] / "docs" / "snapshots.md"

BEFORE: list[list[Change]] = [[insert("1", "one"), insert("2", "two")], [insert("3", "three")]]
AFTER: list[list[Change]] = [[update(("1", "one again"))], [removed(key=("2", None)), insert("4", "four")]]


def command(root: Path, *words: str, code: int = 0) -> Any:
    done = CliRunner().invoke(app, [*words, "--json", "--home", str(root)])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout) if code == 0 else done.stderr


def shown(bucket: Bucket) -> list[list[str]]:
    """The commands that the page shows for S3, at this server."""
    section = PAGE.read_text().partition("## At S3")[2].partition("\n## ")[0]
    lines = [shlex.split(line)[1:] for line in re.findall(r"^millstream snapshot .*$", section, re.MULTILINE)]
    there = {"minio.example:9000": bucket.server.endpoint, "s3://backups/": f"s3://{bucket.name}/"}
    return [[_replaced(word, there) for word in line] for line in lines]


def _replaced(word: str, there: dict[str, str]) -> str:
    for old, new in there.items():
        word = word.replace(old, new)
    return word


@pytest.mark.parametrize(("kind", "write"), [("sqlite", "mirror"), ("duckdb", "changelog")])
def test_what_the_page_shows_keeps_a_target_at_s3_and_brings_it_back_to_follow_on(
    tmp_path: Path, bucket: Bucket, kind: str, write: str
) -> None:
    root = str(tmp_path)
    journal = keeping.home(tmp_path, spec(tmp_path, kind, write), BEFORE)
    assert deliver(root, kind, write, False) == 0
    first = rows(tmp_path, kind)
    create, listed, inspect, restore, prune = shown(bucket)
    (taken,) = command(tmp_path, *create)
    folder = f"targets/shop/log/{taken['id']}"
    assert taken["path"] == f"s3://{bucket.name}/{folder}"
    assert bucket.objects() == [f"{folder}/{name}" for name in ("00001.arrow", "begun.json", "manifest.json")]
    assert [one["id"] for one in command(tmp_path, *listed)] == [taken["id"]]
    found = command(tmp_path, *inspect)
    assert (found["checked"], found["usable"], found["rows"], found["seq"]) == (True, True, len(first), 3)

    for one in AFTER:
        journal.append(ORDERS, one)
    journal.writer.close()
    assert deliver(root, kind, write, False) == 0
    everything = rows(tmp_path, kind)
    assert everything != first
    assert command(tmp_path, *restore)["state"] == "restored"
    assert rows(tmp_path, kind) == first
    assert deliver(root, kind, write, False) == 0
    assert rows(tmp_path, kind) == everything

    at = restore[-1]
    (second,) = command(tmp_path, *create, "--format", "jsonl")
    wipe(tmp_path, kind)
    assert command(tmp_path, "snapshot", "restore", "shop", second["id"], "--path", at)["seq"] == second["seq"]
    assert rows(tmp_path, kind) == everything
    assert command(tmp_path, *prune) == []
    assert [one["id"] for one in command(tmp_path, *prune, "--keep", "1")] == [taken["id"]]
    assert {key.split("/")[3] for key in bucket.objects()} == {second["id"]}
    assert command(tmp_path, "snapshot", "delete", "shop", second["id"], "--path", at)["id"] == second["id"]
    assert (command(tmp_path, *listed), bucket.objects()) == ([], [])


def test_a_schedule_keeps_the_newest_at_s3_and_a_lost_target_begins_with_it(
    engine: Engine, script: Script, tmp_path: Path, bucket: Bucket, watching: Watching
) -> None:
    rules = SnapshotRules(bucket.url(), every_ms=100, keep=2)
    engine.start()
    engine.upsert_stream(shop(script, tmp_path, "sqlite", rules=rules))
    engine.await_ready("shop", 120)

    def seqs() -> list[int]:
        return [one.seq for one in engine.list_snapshots("shop")]

    for id_ in (1, 2, 3):
        script.insert("public.orders", id=id_, note="row")
        await_that(lambda id_=id_: seqs()[-1:] == [id_])  # type: ignore[misc]
    await_that(lambda: seqs() == [2, 3])
    engine.stop()
    for file in tmp_path.glob("copy.sqlite*"):
        file.unlink()
    script.insert("public.orders", id=4, note="four")
    engine.start()
    await_that(lambda: [row[0] for row in copied(tmp_path, "sqlite")] == [1, 2, 3, 4])
    await_that(lambda: (engine.get_status("shop").targets[0].startup or {}).get("path") == "restore")
    assert engine.get_status("shop").targets[0].restore is not None
    engine.stop()
    _no_key(str(watching.events), json.dumps(command(tmp_path / "home", "status", "shop")))
    assert _held_nowhere(tmp_path)


def create_in_small_batches(root: str, at: str) -> None:
    """In a process to be killed."""
    vars(sqlite)["READ_ROWS"] = 2
    keeping.create(root, "jsonl", at)


def test_a_write_that_is_cut_off_leaves_nothing_that_is_listed_and_is_cleared_away(
    tmp_path: Path, bucket: Bucket
) -> None:
    root, at = str(tmp_path), bucket.url()
    # More than one part of an upload: S3 has got some of the file when its writer is killed.
    large = [insert(str(number), secrets.token_hex(600_000)) for number in range(12)]
    keeping.home(tmp_path, spec(tmp_path, "sqlite"), [large]).writer.close()
    assert deliver(root, "sqlite", "mirror", False) == 0
    done = run(create_in_small_batches, root, at, environment={"MILLSTREAM_FAILPOINT": "keep.rows_written:6"})
    assert done.code == -signal.SIGKILL, done.stderr
    assert keeping.kept(tmp_path, at) == []
    (begun,) = bucket.objects()
    assert begun.endswith("/begun.json")
    (upload,) = bucket.uploads()
    assert upload.endswith("/00001.jsonl")
    done = run(create_in_small_batches, root, at, environment={"MILLSTREAM_FAILPOINT": "keep.written"})
    assert done.code == -signal.SIGKILL, done.stderr
    assert keeping.kept(tmp_path, at) == []
    assert begun not in bucket.objects(), "the next one has cleared it away"

    # Of another home, or of a container that is gone with its name, a day later.
    (left,) = SnapshotStore(at).ids("shop", "log")
    keeping.create(root, "arrow", at)
    (snapshot,) = keeping.kept(tmp_path, at)
    wanted = {f"kept/{snapshot.folder}/{name}" for name in ("00001.arrow", "begun.json", "manifest.json")}
    assert set(bucket.objects()) == wanted
    old, recent = (f"{datetime.now(UTC) - age:%Y%m%dT%H%M%S}000Z" for age in (store.ABANDONED * 2, timedelta(hours=1)))
    for id_ in (old, recent):
        bucket.put(f"kept/shop/log/{id_}/00001.arrow", b"half")
    assert left != snapshot.id
    assert Engine(root).prune_snapshots("shop", keep=1, path=at) == []
    assert set(bucket.objects()) == {*wanted, f"kept/shop/log/{recent}/00001.arrow"}
    Engine(root).restore_snapshot("shop", path=at, overwrite=True)
    assert len(rows(tmp_path, "sqlite")) == 12


def test_what_is_wrong_is_said_without_a_key(tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    keeping.home(tmp_path, spec(tmp_path, "sqlite"), BEFORE).writer.close()
    assert deliver(str(tmp_path), "sqlite", "mirror", False) == 0

    def says(at: str, why: str, kind: type[MillstreamError] = SnapshotError) -> None:
        for words in (["create", "shop"], ["list", "shop"]):
            said = command(tmp_path, "snapshot", *words, "--path", at, code=2 if kind is ConfigError else 1)
            assert re.search(why, said), (words, said)
            _no_key(said)
        with pytest.raises(kind, match=why):
            SnapshotStore(at).all_of("shop", "log")

    says(bucket.url(bucket="nowhere"), "there is no such bucket")
    says(bucket.url().replace("s3://", f"s3://{KEY}:{SECRET}@"), "a key or password seems to stand in", ConfigError)
    says(f"{bucket.url()}&secret_key={SECRET}", "a key or password seems to stand in", ConfigError)
    with monkeypatch.context() as changed:
        changed.setenv("AWS_SECRET_ACCESS_KEY", f"{SECRET[:-1]}x")
        says(bucket.url(), "the secret key is not that of the access key")
        changed.setenv("AWS_ACCESS_KEY_ID", "AKIAUNKNOWN")
        says(bucket.url(), "the access key is not known there")
    assert bucket.objects() == []
    bucket.server.stop()
    says(bucket.url(), "its server cannot be reached", SnapshotsUnavailable)
    bucket.server.start()
    keeping.create(str(tmp_path), "arrow", bucket.url())
    assert _held_nowhere(tmp_path)


def test_a_restore_waits_for_a_server_that_is_gone(
    engine: Engine, script: Script, tmp_path: Path, bucket: Bucket, watching: Watching
) -> None:
    engine.start()
    engine.upsert_stream(shop(script, tmp_path, "sqlite", rules=SnapshotRules(bucket.url())))
    engine.await_ready("shop", 120)
    script.insert("public.orders", id=1, note="one")
    await_that(lambda: copied(tmp_path, "sqlite") == [(1, "one")])
    engine.create_snapshot("shop")
    engine.stop()
    for file in tmp_path.glob("copy.sqlite*"):
        file.unlink()
    bucket.server.stop()
    engine.start()
    await_that(lambda: bool(watching.of("delivery.retry")))
    (first, *_) = watching.of("delivery.retry")
    assert "its server cannot be reached" in first.message
    assert copied(tmp_path, "sqlite") == [], "it does not begin anew meanwhile"
    bucket.server.start()
    script.insert("public.orders", id=2, note="two")
    await_that(lambda: copied(tmp_path, "sqlite") == [(1, "one"), (2, "two")])
    await_that(lambda: (engine.get_status("shop").targets[0].startup or {}).get("path") == "restore")
    engine.stop()
    _no_key(str(watching.events), json.dumps(command(tmp_path / "home", "status", "shop")))


def test_a_key_in_a_stream_is_refused_before_it_is_written_down(
    engine: Engine, script: Script, tmp_path: Path, bucket: Bucket
) -> None:
    at = bucket.url().replace("s3://", f"s3://{KEY}:{SECRET}@")
    stream = shop(script, tmp_path, "sqlite", rules=SnapshotRules(bucket.url()))
    engine.upsert_stream(stream)
    with pytest.raises(ConfigError, match="a key or password seems to stand in the s3:// URL") as refused:
        engine.upsert_stream(replace(stream, snapshots=SnapshotRules(at)))
    with engine:
        # Of another process, which would have to write it down to ask this one.
        beside = Engine(tmp_path / "home")
        with pytest.raises(ConfigError, match="a key or password"):
            beside.create_snapshot("shop", path=at)
        with pytest.raises(ConfigError, match="a key or password"):
            beside.upsert_stream(replace(stream, snapshots=SnapshotRules(at)))
    _no_key(str(refused.value))
    assert _held_nowhere(tmp_path)


def test_the_endpoint_may_be_in_the_environment_and_the_command_ends_by_itself(tmp_path: Path, bucket: Bucket) -> None:
    keeping.home(tmp_path, spec(tmp_path, "sqlite"), BEFORE).writer.close()
    assert deliver(str(tmp_path), "sqlite", "mirror", False) == 0
    words = ["snapshot", "create", "shop", "--path", f"s3://{bucket.name}/kept", "--home", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "millstream", *words],
        env={**os.environ, "AWS_ENDPOINT_URL": f"http://{bucket.server.endpoint}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    (snapshot,) = keeping.kept(tmp_path, bucket.url())
    assert snapshot.id in done.stdout


def _no_key(*said: str) -> None:
    for text in said:
        assert SECRET not in text
        assert KEY not in text


def _held_nowhere(root: Path) -> bool:
    """Whether no file of a home, state and logs, has a key in it."""
    files = [path.read_bytes() for path in root.rglob("*") if path.is_file()]
    return not any(word.encode() in data for data in files for word in (SECRET, KEY))
