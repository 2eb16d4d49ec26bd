"""A source behind TLS, with a password by reference: it works, and what is wrong is told."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from millstream.cli.app import app
from millstream.demo.proof import read_changes
from millstream.embedded import EmbeddedPostgres, server_directory
from millstream.errors import SourceHalted
from millstream.sources.postgres.connection import connect, connect_replication
from millstream.sources.postgres.options import PostgresOptions
from tests.fixtures.postgres_source import opened, source_spec
from tests.fixtures.tls import Authority, SecureServer, secure_server

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(300)]

PASSWORD = "öffne-dich/ 50% & mehr"
VARIABLE = "TEST_CAPTURE_PASSWORD"

STREAM = """\
name: secure
source:
  kind: postgres
  uri: "{uri}"
  auth_ref: env:{variable}
  tables: [public.orders]
  slot: secure
mode: cdc
targets:
  - {{name: log, kind: files, path: log, format: parquet}}
"""


@pytest.fixture(scope="module")
def secure() -> Iterator[SecureServer]:
    directory = server_directory("millstream-test-")
    directory.chmod(0o755)
    try:
        with secure_server(directory, PASSWORD) as server:
            yield server
    finally:
        subprocess.run(["/bin/rm", "-rf", str(directory)], check=True)


@pytest.fixture(autouse=True)
def password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, PASSWORD)


def refusal(uri: str) -> SourceHalted:
    """What both kinds of connection say, which must be the same; never with the password in it."""
    spec = source_spec(uri, auth_ref=f"env:{VARIABLE}")
    said = []
    for attempt in (connect, connect_replication):
        with pytest.raises(SourceHalted) as raised:
            attempt(spec, PostgresOptions.of(spec))
        assert os.environ[VARIABLE] not in f"{raised.value} {raised.value.hint} {raised.getrepr()}"
        said.append(raised.value)
    assert said[0].hint == said[1].hint
    return said[0]


@pytest.mark.spark
def test_changes_arrive_and_the_password_is_nowhere_on_disk(
    secure: SecureServer, tmp_path: Path, spark: SparkSession
) -> None:
    secure.admin.sql(
        "CREATE TABLE orders (id int PRIMARY KEY, note text); ALTER TABLE orders OWNER TO capture;"
        "GRANT CREATE ON DATABASE postgres TO capture"
    )
    uri = secure.uri()
    with opened(source_spec(uri, "public.orders", auth_ref=f"env:{VARIABLE}", slot="secure")) as control:
        control.prepare()
        assert secure.admin.sql(
            "SELECT backend_type, ssl FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE usename = 'capture'"
            " ORDER BY backend_type"
        ) == [("client backend", True), ("walsender", True)]
    secure.admin.sql("INSERT INTO orders SELECT n, 'note ' || n FROM generate_series(1, 500) n")
    secure.admin.sql("UPDATE orders SET note = 'späte Nachricht' WHERE id = 7; DELETE FROM orders WHERE id = 8")

    (tmp_path / "secure.yaml").write_text(STREAM.format(uri=uri, variable=VARIABLE))
    done = CliRunner().invoke(app, ["run", f"{tmp_path}/secure.yaml", "--once", "--home", f"{tmp_path}/home"])
    assert done.exit_code == 0, done.output

    changes = pa.concat_tables(read_changes(tmp_path / "log" / "public.orders")).sort_by("_ms_seq")
    rows = list(zip(*(changes[name].to_pylist() for name in ("_ms_op", "id", "note")), strict=True))
    assert rows == [
        *(("c", number, f"note {number}") for number in range(1, 501)),
        ("u", 7, "späte Nachricht"),
        ("d", 8, None),
    ]

    secrets = [PASSWORD.encode(), PASSWORD.split()[0].encode()]
    # Spark's own files, its log of events among them, are not in the home of a session that was there before.
    places = [tmp_path, Path(spark.conf.get("spark.local.dir") or "").parent]
    # `walk` passes over directories that are gone by then.
    files = [Path(directory, name) for place in places for directory, _, names in os.walk(place) for name in names]
    assert {"home", "log", "spark.log", "events"} <= {part for path in files for part in path.parts}
    for path in files:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            continue
        assert not any(secret in content for secret in secrets), f"the password is in {path}"
    assert not any(secret.decode() in done.output for secret in secrets)


def test_a_certificate_of_another_authority(secure: SecureServer, tmp_path: Path) -> None:
    error = refusal(secure.uri(ca=Authority.made(tmp_path / "another").ca))
    assert "certificate verify failed" in str(error)
    assert error.hint is not None
    assert "sslrootcert" in error.hint


def test_no_certificate_of_the_authority(secure: SecureServer, tmp_path: Path) -> None:
    error = refusal(secure.uri(ca=tmp_path / "missing.pem"))
    assert "missing.pem" in str(error)
    assert error.hint is not None
    assert "sslrootcert" in error.hint


def test_another_name_than_the_certificates(secure: SecureServer) -> None:
    error = refusal(secure.uri(host="elsewhere.test"))
    assert 'does not match host name "elsewhere.test"' in str(error)
    assert error.hint == "use a host name that the certificate has in the uri, or sslmode=verify-ca to check none"


def test_a_server_without_tls(secure: SecureServer, postgres: EmbeddedPostgres) -> None:
    error = refusal(secure.uri().replace(f":{secure.server.port}/", f":{postgres.port}/"))
    assert "does not support SSL" in str(error)
    assert error.hint == "turn on ssl at the server, or choose another sslmode in the uri"


def test_a_server_that_wants_tls_and_a_client_that_does_not(secure: SecureServer) -> None:
    error = refusal(secure.uri(mode="disable"))
    assert "no encryption" in str(error)
    assert error.hint == "the server wants TLS from this role: add sslmode=require (or verify-full) to the uri"


def test_a_wrong_password(secure: SecureServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "Mellon")
    error = refusal(secure.uri())
    assert "password authentication failed" in str(error)
    assert error.hint == "set auth_ref to the password of the role"
