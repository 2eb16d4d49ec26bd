"""May capture go on? Every way in which a server and a journal come apart halts before a row is read."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millstream.embedded import EmbeddedPostgres
from millstream.errors import SourceHalted, SourceUnavailable
from millstream.sources.base import SourceIdentity
from millstream.sources.postgres.checks import identify
from millstream.sources.postgres.connection import SESSION_SETTINGS
from millstream.sources.postgres.slot import drop_slot, ensure_slot, lock_source, slot_info
from tests.fixtures.postgres import TEST_SETTINGS, Database
from tests.fixtures.postgres_source import Control, opened, opened_at, source_spec

pytestmark = pytest.mark.postgres


@pytest.fixture
def control(any_database: Database) -> Iterator[Control]:
    any_database.sql("CREATE TABLE a (id int PRIMARY KEY)")
    with opened_at(any_database) as made:
        yield made


def move_on(control: Control) -> int:
    """Write to the source, and return the end of its log."""
    control.conn.execute("INSERT INTO public.a SELECT coalesce(max(id), 0) + 1 FROM public.a")
    return control.position()


# What a journal is bound to


def test_the_identity_names_all_that_a_journal_depends_on(any_database: Database, control: Control) -> None:
    identity = control.prepare()
    info = slot_info(control.conn, control.options.slot)
    assert info is not None
    publications = any_database.sql("SELECT pubname, oid::int8 FROM pg_publication")
    ((oid,),) = any_database.sql(f"SELECT oid::int8 FROM pg_database WHERE datname = '{any_database.name}'")
    assert identity == SourceIdentity(
        "postgres",
        {
            "system_identifier": str(any_database.sql("SELECT system_identifier FROM pg_control_system()")[0][0]),
            "timeline": 1,
            "timeline_history": [],
            "database": any_database.name,
            "database_oid": oid,
            "slot": f"millstream_{any_database.name}",
            "consistent_point": info.confirmed_flush,
            "publications": dict(publications),
            "plugin_options": control.options.plugin_options(control.conn.info.server_version),
            "session_settings": dict(SESSION_SETTINGS),
            "server_version": control.conn.info.server_version,
        },
        start=info.confirmed_flush or 0,
    )  # fmt: skip
    assert len(publications) == 2
    control.check(identity, identity.start)
    control.check(identity, move_on(control))


OTHER_FACTS: list[tuple[str, object, str]] = [
    ("system_identifier", "1", "this is another database cluster"),
    ("database_oid", 1, "is not the one the journal was made from"),
    ("timeline", 7, "does not descend from the journal's timeline 7"),
    ("slot", "other", "the journal was made from slot other"),
    ("publications", {"other": 1}, "and publications other, the source now names slot"),
    ("session_settings", {"TimeZone": "Asia/Tokyo"}, "written in another way than in the journal so far: TimeZone"),
]


def test_a_journal_of_another_source_is_refused(database: Database) -> None:
    database.sql("CREATE TABLE a (id int PRIMARY KEY)")
    with opened_at(database) as control:
        identity = control.prepare()
        for fact, value, said in OTHER_FACTS:
            other = SourceIdentity(identity.kind, {**identity.facts, fact: value}, identity.start)
            with pytest.raises(SourceHalted, match=said) as halted:
                control.check(other, identity.start)
            assert halted.value.hint


# The slot


def test_a_slot_that_was_moved_behind_our_back_halts(control: Control) -> None:
    identity = control.prepare()
    end = move_on(control)
    control.check(identity, end)
    move_on(control)
    control.conn.execute(f"SELECT pg_replication_slot_advance('{control.options.slot}', pg_current_wal_lsn())")
    with pytest.raises(SourceHalted, match="somebody else moved it, or the journal is an older copy"):
        control.check(identity, end)
    control.check(identity, control.position())


def test_a_slot_that_is_gone_halts_and_so_does_its_successor(control: Control) -> None:
    identity = control.prepare()
    end = move_on(control)
    assert drop_slot(control.conn, control.options.slot)
    assert not drop_slot(control.conn, control.options.slot)
    with pytest.raises(SourceHalted, match="does not exist any more, so changes may be lost"):
        control.check(identity, end)
    move_on(control)
    control.prepare()
    with pytest.raises(SourceHalted, match="beyond the journal's end"):
        control.check(identity, end)


def test_a_slot_of_another_kind_halts(any_database: Database, control: Control) -> None:
    identity = control.prepare()
    slot = control.options.slot
    drop_slot(control.conn, slot)
    any_database.sql(f"SELECT pg_create_physical_replication_slot('{slot}')")
    try:
        with pytest.raises(SourceHalted, match="belongs to the plugin None, not to pgoutput"):
            control.check(identity, control.position())
        with pytest.raises(SourceHalted, match="drop it to start anew: SELECT pg_drop_replication_slot"):
            ensure_slot(control.conn, control.replication, control.options, publications_created=False)
    finally:
        drop_slot(control.conn, slot)
    postgres = Database(any_database.server, "postgres")
    postgres.sql(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    try:
        with pytest.raises(SourceHalted, match="belongs to the database postgres, not to"):
            control.check(identity, control.position())
    finally:
        postgres.sql(f"SELECT pg_drop_replication_slot('{slot}')")


def test_a_start_that_was_killed_after_making_the_slot_finds_it_again(database: Database) -> None:
    database.sql("CREATE TABLE a (id int PRIMARY KEY)")
    program = (
        "import sys\n"
        "from tests.fixtures.postgres_source import opened, source_spec\n"
        "with opened(source_spec(sys.argv[1], name=sys.argv[2])) as control:\n"
        "    control.prepare()\n"
    )
    for step in ("capture.publication_created", "capture.slot_created"):
        killed = subprocess.run(
            [sys.executable, "-c", program, database.uri, database.name],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "MILLSTREAM_FAILPOINT": step},
            check=False,
        )
        assert killed.returncode == -9
    database.sql("INSERT INTO a VALUES (1)")
    with opened_at(database) as control:
        info = slot_info(control.conn, control.options.slot)
        assert info is not None
        assert info.confirmed_flush is not None
        assert control.position() > info.confirmed_flush
        plan = control.sync()
        start = ensure_slot(control.conn, control.replication, control.options, publications_created=plan.created)
        assert (start.consistent_point, start.created, plan.created) == (info.confirmed_flush, False, False)


def test_a_slot_older_than_its_publications_is_not_adopted(control: Control) -> None:
    control.prepare()
    for name in control.options.publications:
        control.conn.execute(f"DROP PUBLICATION {name}".encode())
    with pytest.raises(SourceHalted, match="is older than the publications"):
        control.prepare()


def test_a_new_slot_waits_for_open_transactions_and_says_for_which(database: Database) -> None:
    database.sql("CREATE TABLE a (id int PRIMARY KEY)")
    with opened_at(database) as control, database.connect(autocommit=False, application_name="slow job") as writer:
        writer.execute("INSERT INTO a VALUES (1)")
        plan = control.sync()
        heard: list[str] = []
        told = threading.Event()

        def end_the_writer() -> None:
            told.wait(60)
            writer.commit()

        def on_wait(said: str) -> None:
            heard.append(said)
            told.set()

        ending = threading.Thread(target=end_the_writer)
        ending.start()
        start = ensure_slot(
            control.conn, control.replication, control.options, publications_created=plan.created, on_wait=on_wait
        )
        ending.join()
        assert start.created
        assert f"process {writer.info.backend_pid} (slow job" in heard[0]


def test_only_one_capture_has_a_source(any_database: Database, control: Control) -> None:
    lock_source(control.conn, control.options.slot)
    with opened_at(any_database) as second:
        with pytest.raises(SourceUnavailable, match=f"server process {control.conn.info.backend_pid}, from 127.0.0.1"):
            lock_source(second.conn, second.options.slot)
        lock_source(second.conn, "another_slot")
        control.conn.close()
        any_database.await_true("SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory'")
        lock_source(second.conn, second.options.slot)


# The publications


def test_publications_that_are_gone_or_new_or_changed_halt(control: Control) -> None:
    identity = control.prepare()
    main, second = control.options.publications
    control.conn.execute(f"ALTER PUBLICATION {main} DROP TABLE public.a".encode())
    with pytest.raises(SourceHalted, match=r"table public\.a is no longer in publication"):
        control.check(identity, identity.start)
    control.conn.execute(f"DROP PUBLICATION {main}".encode())
    with pytest.raises(SourceHalted, match=f"publication {main} does not exist any more"):
        control.check(identity, identity.start)
    control.sync()
    with pytest.raises(SourceHalted, match=f"publication {main} was dropped and created again"):
        control.check(identity, identity.start)
    assert second in identity.facts["publications"]


# The server


def test_two_connections_to_two_servers_are_noticed(database: Database, postgres16: EmbeddedPostgres) -> None:
    database.sql("CREATE TABLE a (id int PRIMARY KEY)")
    with opened_at(database) as control, opened(source_spec(postgres16.uri())) as other:
        identity = control.prepare()
        with pytest.raises(SourceUnavailable, match="reached different servers"):
            replace(control, replication=other.replication).check(identity, identity.start)


@pytest.fixture(params=[18, 16], ids=["pg18", "pg16"])
def server(request: pytest.FixtureRequest, server_dir: Path) -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(server_dir / "first", request.param, TEST_SETTINGS) as made:
        yield made


def copy_of(server: EmbeddedPostgres, name: str, *, standby: bool) -> EmbeddedPostgres:
    """A copy of the stopped server's files, slot included, as a backup of the disk would have it."""
    data = server.data_dir.parent / name
    subprocess.run(["/bin/cp", "-a", str(server.data_dir), str(data)], check=True)
    if standby:
        (data / "standby.signal").touch()
    return EmbeddedPostgres(data, server.version, TEST_SETTINGS, server.port)


def test_servers_that_took_the_place_of_ours(server: EmbeddedPostgres) -> None:
    """A promoted standby that has our last transactions is fine; whatever lacks them halts."""
    Database(server, "postgres").sql("CREATE TABLE public.a (id int PRIMARY KEY)")
    spec = source_spec(server.uri(), "public.a")
    with opened(spec) as control:
        identity = control.prepare()
        move_on(control)
    server.stop()
    old_standby = copy_of(server, "old_standby", standby=True)
    old_disk = copy_of(server, "old_disk", standby=False)
    server.start()
    with opened(spec) as control:
        control.conn.execute("INSERT INTO public.a SELECT generate_series(10, 20000)")
        end = control.position()
        control.check(identity, end)
    server.stop()
    good = copy_of(server, "good", standby=True)

    with (
        old_disk,
        opened(spec) as control,
        pytest.raises(SourceHalted, match="restored from a backup or lost its last"),
    ):
        control.check(identity, end)

    with old_standby:
        old_standby.promote()
        with opened(spec) as control:
            control.conn.execute("INSERT INTO public.a SELECT generate_series(10, 40000)")
            assert control.position() > end
            with pytest.raises(SourceHalted, match="the journal has transactions that this server lost"):
                control.check(identity, end)

    with good:
        with opened(spec) as control, pytest.raises(SourceUnavailable, match="the server is a standby"):
            control.check(identity, end)
        good.promote()
        with opened(spec) as control:
            assert identify(control.replication).timeline == 2
            later = control.check(identity, end)
            assert (later.facts["timeline"], [line[0] for line in later.facts["timeline_history"]]) == (2, [1])
            beyond = move_on(control)
            assert control.check(later, beyond) == later
            with pytest.raises(SourceHalted, match="the journal has transactions that this server lost"):
                control.check(identity, beyond)
            # Another standby was promoted as well, and the journal has gone on with that one.
            ((first, left),) = later.facts["timeline_history"]
            strange = replace(later, facts={**later.facts, "timeline_history": [[first, left - 8]]})
            with pytest.raises(SourceHalted, match="came to timeline 2 in another way"):
                control.check(strange, end)
