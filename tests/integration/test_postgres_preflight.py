"""Preflight: each thing that keeps capture from working is found, named and comes with its fix."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from millstream.embedded import EmbeddedPostgres
from millstream.errors import ConfigError, SecretError, SourceHalted, SourceUnavailable
from millstream.model import SourceSpec
from millstream.sources.base import Finding, Severity
from millstream.sources.postgres.connection import connect, connect_replication
from millstream.sources.postgres.options import PostgresOptions
from millstream.sources.postgres.preflight import preflight
from millstream.sources.postgres.server import Server, server_findings
from tests.fixtures.postgres import TEST_SETTINGS, Database
from tests.fixtures.postgres_source import opened_at, source_spec

pytestmark = pytest.mark.postgres


def findings_of(spec: SourceSpec, *least: Severity) -> dict[str, Finding]:
    """The findings of a preflight by what was checked; only those of the given severities."""
    found = preflight(spec, PostgresOptions.of(spec))
    return {finding.check: finding for finding in found if finding.severity in (least or tuple(Severity))}


def test_a_fit_database_passes_and_is_left_as_it_was(any_database: Database) -> None:
    any_database.sql("CREATE TABLE a (id int PRIMARY KEY)")
    found = findings_of(source_spec(any_database.uri, name=any_database.name))
    assert {finding.severity for finding in found.values()} == {Severity.OK}
    assert {"connection", "version", "wal_level", "slots", "role", "replication", "tables", "publication"} <= set(found)
    assert found["tables"].message == "1 to capture: public.a"
    assert any_database.sql("SELECT count(*) FROM pg_publication") == [(0,)]
    with opened_at(any_database) as control:
        control.prepare()
        again = findings_of(source_spec(any_database.uri, name=any_database.name))
        assert {finding.severity for finding in again.values()} == {Severity.OK}
        assert again["slots"].message == f"slot {control.options.slot} exists and is sound"


def test_tables_are_looked_at_one_by_one(any_database: Database) -> None:
    any_database.sql("""
        CREATE TABLE secured (id int PRIMARY KEY); ALTER TABLE secured ENABLE ROW LEVEL SECURITY;
        CREATE TABLE computed (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED);
        CREATE TABLE late (id int PRIMARY KEY DEFERRABLE);
        CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id);
        CREATE UNLOGGED TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (9)""")
    found = findings_of(source_spec(any_database.uri, "public.*", "public.missing"), Severity.WARNING, Severity.ERROR)
    assert found["row_security"].table == "public.secured"
    assert "every row is captured" in found["row_security"].message
    assert found["identity"].fix == 'ALTER TABLE "public"."late" REPLICA IDENTITY FULL'
    assert found["identity"].message.endswith("its primary key is deferrable")
    assert found["partitions"].message.endswith('public.parts are not in the log: "public"."parts_1"')
    assert found["tables"].message == "table public.missing does not exist"
    assert found["tables"].severity is Severity.ERROR
    before_18 = {"generated"} if any_database.server.version < 18 else set()
    assert set(found) == {"row_security", "identity", "partitions", "tables"} | before_18


def test_missing_rights_come_with_the_sql_that_grants_them(any_database: Database) -> None:
    role = f"role_{any_database.name}"
    any_database.sql(f"CREATE TABLE a (id int PRIMARY KEY); CREATE ROLE {role} LOGIN")
    try:
        spec = source_spec(any_database.server.uri(any_database.name, role), name=any_database.name)
        found = preflight(spec, PostgresOptions.of(spec))
        errors = {finding.fix for finding in found if finding.severity is Severity.ERROR}
        assert f'ALTER ROLE "{role}" REPLICATION' in errors
        assert any(f'GRANT CREATE ON DATABASE "{any_database.name}" TO "{role}"' in str(fix) for fix in errors)
        assert f'GRANT <owner of "public"."a"> TO "{role}"' in errors
        assert sum("CREATE PUBLICATION" in str(fix) for fix in errors) == 1
        assert 'GRANT SELECT ON "public"."a"' in str([f.fix for f in found if f.severity is Severity.WARNING])
        with pytest.raises(SourceHalted, match="cannot connect to") as refused:
            connect_replication(spec, PostgresOptions.of(spec))
        assert refused.value.hint == f"ALTER ROLE {role} REPLICATION"

        any_database.sql(f"ALTER ROLE {role} REPLICATION; ALTER TABLE a OWNER TO {role}")
        any_database.sql(f'GRANT CREATE ON DATABASE "{any_database.name}" TO {role}')
        assert findings_of(spec, Severity.ERROR, Severity.WARNING) == {}
    finally:
        any_database.sql(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")


def test_a_filter_that_would_break_updates_is_found_without_a_trace(any_database: Database) -> None:
    any_database.sql("CREATE TABLE a (id int PRIMARY KEY, v text)")
    spec = source_spec(any_database.uri, push=True, rows={"public.a": "v = 'x'"})
    found = findings_of(spec, Severity.ERROR)
    assert "the row filter uses v" in found["publication"].message
    assert any_database.sql("SELECT count(*) FROM pg_publication") == [(0,)]
    broken = findings_of(replace(spec, options={"push": True, "rows": {"public.a": "nonsense("}}), Severity.ERROR)
    assert "syntax error" in broken["publication"].message


@pytest.mark.parametrize(
    ("version", "severity", "fix"),
    [
        (130020, Severity.ERROR, "upgrade to Postgres 14.19 or newer"),
        (140018, Severity.ERROR, "upgrade the server to 14.19 or newer"),
        (150013, Severity.ERROR, "upgrade the server to 15.14 or newer"),
        (160009, Severity.ERROR, "upgrade the server to 16.10 or newer"),
        (170005, Severity.ERROR, "upgrade the server to 17.6 or newer"),
        (170006, Severity.OK, None),
        (180000, Severity.OK, None),
        (190000, Severity.WARNING, None),
    ],
)
def test_old_minors_are_refused(postgres: EmbeddedPostgres, version: int, severity: Severity, fix: str | None) -> None:
    spec = source_spec(postgres.uri(), origin="none", failover=True, push=True, columns={"a.b": ["c"]})
    options = PostgresOptions.of(spec)
    with connect(spec, options) as conn:
        server = replace(Server.read(conn), version=version)
        found = list(server_findings(conn, server, spec, options))
    assert (found[0].check, found[0].severity, found[0].fix) == ("version", severity, fix)
    needs = [finding.message for finding in found if finding.check == "options"]
    assert needs == [
        said
        for least, said in (
            (150000, "`columns` and `rows` needs Postgres 15"),
            (160000, "`origin: none` needs Postgres 16"),
            (170000, "`failover` needs Postgres 17"),
        )
        if version < least
    ]


def test_a_slot_for_failover_that_may_be_ahead_of_the_standbys_is_told(postgres: EmbeddedPostgres) -> None:
    spec = source_spec(postgres.uri(), failover=True)
    options = PostgresOptions.of(spec)
    with connect(spec, options) as conn:
        server = Server.read(conn)
        (found,) = [one for one in server_findings(conn, server, spec, options) if one.check == "failover"]
        waits = replace(server, settings={**server.settings, "synchronized_standby_slots": "standby"})
        assert "failover" not in [one.check for one in server_findings(conn, waits, spec, options)]
    assert "ALTER SYSTEM SET synchronized_standby_slots" in (found.fix or "")


# A server where nothing is as it should be

AWKWARD = {
    **TEST_SETTINGS,
    "wal_level": "replica",
    "max_replication_slots": "1",
    "max_wal_senders": "1",
    "max_slot_wal_keep_size": "64MB",
    "wal_sender_timeout": "5s",
    "synchronous_standby_names": "ANY 1 (one, *)",
    "synchronous_commit": "local",
    "idle_replication_slot_timeout": "2h",
    "authentication_timeout": "1s",
}


@pytest.fixture(scope="module")
def awkward() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(settings=AWKWARD) as server:
        database = Database(server, "postgres")
        database.sql("CREATE TABLE a (id int PRIMARY KEY); SELECT pg_create_physical_replication_slot('taken')")
        database.sql("CREATE ROLE by_password LOGIN PASSWORD 'right'; CREATE ROLE by_tls LOGIN; CREATE ROLE nobody_may")
        hba = server.data_dir / "pg_hba.conf"
        lines = "host all by_password all scram-sha-256\nhostssl all by_tls all trust\nhost all by_tls all reject\n"
        hba.write_text(lines + hba.read_text())
        database.sql("SELECT pg_reload_conf()")
        database.await_true(
            "SELECT count(*) = 3 FROM pg_hba_file_rules WHERE user_name[1] IN ('by_password', 'by_tls')"
        )
        yield server


def test_every_unfit_setting_is_named_at_once(awkward: EmbeddedPostgres) -> None:
    spec = source_spec(awkward.uri())
    with connect(spec, PostgresOptions.of(spec)) as _:
        sender = connect_replication(spec, PostgresOptions.of(spec))
        found = findings_of(spec, Severity.ERROR, Severity.WARNING)
        sender.finish()
    assert {check: finding.severity for check, finding in found.items()} == {
        "wal_level": Severity.ERROR,
        "slots": Severity.ERROR,
        "synchronous_standby_names": Severity.ERROR,
        "replication": Severity.ERROR,
        "max_slot_wal_keep_size": Severity.WARNING,
        "idle_replication_slot_timeout": Severity.WARNING,
        "wal_sender_timeout": Severity.WARNING,
    }
    assert found["wal_level"].fix == "ALTER SYSTEM SET wal_level = 'logical'; then restart the server"
    assert "ALTER SYSTEM SET max_replication_slots = 11" in str(found["slots"].fix)
    assert "every commit of the application would wait" in found["synchronous_standby_names"].message
    assert found["replication"].fix == "ALTER SYSTEM SET max_wal_senders = 11; then restart the server"
    assert "max_slot_wal_keep_size = '8192MB'" in str(found["max_slot_wal_keep_size"].fix)
    assert "nobody has read for 2h" in found["idle_replication_slot_timeout"].message
    assert "gives us up after 5s" in found["wal_sender_timeout"].message


def test_a_refused_connection_is_one_finding_with_its_fix(
    awkward: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MS_TEST_WRONG", "hunter2")
    (tmp_path / "right").write_text("right\n")
    port = awkward.port
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        cases = [
            (awkward.uri(user="by_password"), "env:MS_TEST_WRONG", "password authentication failed", "set auth_ref"),
            (f"postgresql://by_password:hunter2@127.0.0.1:{port}/x", None, "password authentication failed", "set"),
            (awkward.uri(user="by_password"), None, "no password supplied", "set auth_ref"),
            (awkward.uri(user="by_tls"), None, "pg_hba.conf", "add to pg_hba.conf: hostssl postgres by_tls"),
            (awkward.uri(user="nobody_may"), None, "is not permitted to log in", "ALTER ROLE nobody_may LOGIN"),
            (awkward.uri(user="stranger"), None, 'role "stranger" does not exist', "CREATE ROLE stranger LOGIN"),
            (awkward.uri("nothere"), None, 'database "nothere" does not exist', "correct the database"),
            (awkward.uri() + "?sslmode=require", None, "does not support SSL", "turn on ssl"),
            (f"postgresql://127.0.0.1:{closed.getsockname()[1]}/x", None, "Connection refused", "is the server up"),
            ("postgresql://nowhere.invalid/x", None, "nowhere.invalid", "is the server up"),
            (awkward.uri(), "env:MS_TEST_UNSET", "the environment variable MS_TEST_UNSET is not set", "export"),
            ("postgresql://app:hunt er2@h/d", None, "is not a Postgres connection string", "postgresql://user@host"),
            ("postgresql://app:hunter2", None, "the port in the source's uri is not a number", "postgresql://user@"),
        ]
        for uri, auth_ref, said, fix in cases:
            spec = source_spec(uri, auth_ref=auth_ref)
            (finding,) = preflight(spec, PostgresOptions.of(spec))
            assert (finding.check, finding.severity) == ("connection", Severity.ERROR)
            assert said in finding.message
            assert str(finding.fix).startswith(fix)
            assert "hunter2" not in str(finding)
    right = source_spec(awkward.uri(user="by_password"), auth_ref=f"file:{tmp_path / 'right'}")
    connect(right, PostgresOptions.of(right)).close()


def test_errors_of_a_connection_are_of_the_right_kind(awkward: EmbeddedPostgres) -> None:
    for kind, spec in (
        (SourceHalted, source_spec(awkward.uri(user="stranger"))),
        (SourceUnavailable, source_spec("postgresql://127.0.0.1:1/x")),
        (ConfigError, source_spec("postgresql://%zz/")),
        (SecretError, source_spec(awkward.uri(), auth_ref="hunter2")),
        (ConfigError, source_spec("postgresql://app:hunter2@h/d", auth_ref="env:HOME")),
    ):
        for way in (connect, connect_replication):
            with pytest.raises(kind) as caught:
                way(spec, PostgresOptions.of(spec))
            assert "hunter2" not in str(caught.value)


def test_a_silent_server_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        spec = source_spec(f"postgresql://127.0.0.1:{silent.getsockname()[1]}/x", connect_timeout="1s")
        for way in (connect, connect_replication):
            with pytest.raises(SourceUnavailable, match="timeout"):
                way(spec, PostgresOptions.of(spec))


def test_the_hosts_of_a_uri_are_tried_in_turn(postgres: EmbeddedPostgres) -> None:
    uri = f"postgresql://postgres@127.0.0.1:1,127.0.0.1:{postgres.port}/postgres"
    options = PostgresOptions.of(source_spec(uri))
    with connect(source_spec(uri), options) as conn:
        assert conn.info.port == postgres.port
    replication = connect_replication(source_spec(uri), options)
    assert replication.port == str(postgres.port).encode()
    replication.finish()
    with pytest.raises(SourceUnavailable, match="Connection refused"):
        connect_replication(source_spec("postgresql://127.0.0.1:1,127.0.0.1:1/x"), options)


def test_a_standby_is_no_source(postgres: EmbeddedPostgres, server_dir: Path) -> None:
    Database(postgres, "postgres").sql("CREATE TABLE IF NOT EXISTS standing_by (id int PRIMARY KEY)")
    with postgres.basebackup(server_dir / "standby") as standby:
        found = findings_of(source_spec(standby.uri(), "public.standing_by"), Severity.ERROR)
        assert "name the primary in the uri" in str(found["standby"].fix)
    Database(postgres, "postgres").sql("DROP TABLE standing_by")


# A pooler


@contextmanager
def pooler(server: EmbeddedPostgres) -> Iterator[int]:
    """Passes everything on, but gives its own process id to clients, as poolers do."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                upstream = socket.create_connection(("127.0.0.1", server.port))
                for source, sink, alter in ((client, upstream, False), (upstream, client, True)):
                    threads.append(threading.Thread(target=copy, args=(source, sink, alter), daemon=True))
                    threads[-1].start()

    def copy(source: socket.socket, sink: socket.socket, alter: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                at = data.find(b"K\0\0\0\x0c") if alter else -1
                sink.sendall(data[: at + 5] + struct.pack(">I", 7) + data[at + 9 :] if at >= 0 else data)
        for side in (source, sink):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    accepting = threading.Thread(target=serve, daemon=True)
    accepting.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join(10)
        for thread in threads:
            thread.join(10)


def test_a_pooler_in_front_is_refused(postgres: EmbeddedPostgres) -> None:
    with pooler(postgres) as port:
        spec = source_spec(f"postgresql://postgres@127.0.0.1:{port}/postgres?sslmode=disable")
        (finding,) = preflight(spec, PostgresOptions.of(spec))
        assert (finding.check, finding.severity) == ("pooler", Severity.ERROR)
        assert finding.message == "a connection pooler stands between us and the server"
        with pytest.raises(SourceHalted, match="pooler stands between"):
            connect_replication(spec, PostgresOptions.of(spec))
