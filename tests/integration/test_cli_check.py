"""`millstream check --connect` on a real server: each miss is named, and nothing is changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millstream.cli.app import app
from millstream.model import Json
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres


FILES = {"name": "log", "kind": "files", "path": "./log"}


def check(tmp_path: Path, uri: str, tables: list[str], target: Json = FILES, **keys: Any) -> tuple[int, Json]:
    """Exit code and JSON of a check with a look at the database."""
    stream = {
        "name": "shop",
        "source": {"kind": "postgres", "uri": uri, "tables": tables, "connect_timeout": "3s"},
        "mode": "cdc",
        "targets": [target],
        **keys,
    }
    (tmp_path / "shop.yaml").write_text(json.dumps(stream))
    result = CliRunner().invoke(app, ["check", "--connect", "--json", str(tmp_path / "shop.yaml")])
    found: Json = json.loads(result.stdout)
    return result.exit_code, found


def findings(found: Json, severity: str) -> list[tuple[str, str]]:
    return [(one["check"], one["message"]) for one in found["findings"]["shop"] if one["severity"] == severity]


def test_a_fit_database_passes_and_nothing_is_created(tmp_path: Path, database: Database) -> None:
    database.sql("CREATE TABLE orders (id int PRIMARY KEY)")
    code, found = check(tmp_path, database.uri, ["public.orders"])
    assert (code, found["ok"]) == (0, True)
    assert findings(found, "error") == []
    assert database.sql("SELECT count(*) FROM pg_publication") == [(0,)]
    assert database.sql(f"SELECT count(*) FROM pg_replication_slots WHERE database = '{database.name}'") == [(0,)]
    assert [path.name for path in tmp_path.iterdir()] == ["shop.yaml"]


def test_a_missing_table_is_named(tmp_path: Path, database: Database) -> None:
    code, found = check(tmp_path, database.uri, ["public.nothing"])
    assert (code, found["ok"]) == (1, False)
    assert any("public.nothing" in message for _, message in findings(found, "error"))


def test_a_partition_that_comes_as_its_root_is_an_error(tmp_path: Path, database: Database) -> None:
    database.sql("CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    database.sql("CREATE TABLE parts_low PARTITION OF parts FOR VALUES FROM (0) TO (100)")
    source = {"name": "shop", "kind": "postgres", "uri": database.uri}
    streams = [
        {
            "name": name,
            "source": {**source, "tables": [f"public.{name}"]},
            "mode": "cdc",
            "targets": [{**FILES, "path": f"./{name}"}],
        }
        for name in ("parts", "parts_low")
    ]
    (tmp_path / "shop.yaml").write_text(json.dumps({"streams": streams}))
    result = CliRunner().invoke(app, ["check", "--connect", "--json", str(tmp_path / "shop.yaml")])
    assert result.exit_code == 1
    ((name, said),) = findings(json.loads(result.stdout), "error")
    assert name == "partitions"
    assert said.startswith("stream parts_low: public.parts_low is a partition of public.parts, which another stream")


def test_a_server_that_is_not_there_is_a_finding(tmp_path: Path, database: Database) -> None:
    uri = f"postgresql://postgres@127.0.0.1:1/{database.name}"
    code, found = check(tmp_path, uri, ["public.orders"])
    assert code == 1
    assert [name for name, _ in findings(found, "error")] == ["connection"]


@pytest.mark.parametrize(("write", "said"), [("mirror", True), ("changelog", False)])
def test_a_table_that_a_mirror_cannot_follow_is_named(
    tmp_path: Path, database: Database, write: str, said: bool
) -> None:
    database.sql(
        "CREATE TABLE bag (v text); ALTER TABLE bag REPLICA IDENTITY FULL; CREATE TABLE fine (id int PRIMARY KEY)"
    )
    copy = {"name": "copy", "kind": "sqlite", "path": "./copy.db", "write": write}
    code, found = check(tmp_path, database.uri, ["public.*"], copy)
    assert code == 0
    keys = [one for one in found["findings"]["shop"] if one["check"] == "key"]
    assert [(one["table"], one["message"]) for one in keys] == [
        ("public.bag", "it has no primary key: an update or delete of it stops copy")
    ] * said


def test_filters_and_transforms_are_held_against_the_tables(tmp_path: Path, database: Database) -> None:
    database.sql(
        "CREATE TABLE orders (id int PRIMARY KEY, status text); CREATE TABLE items (id int PRIMARY KEY, n int)"
    )
    copy = {"name": "copy", "kind": "sqlite", "path": "./copy.db"}
    shape = {
        "match": [{"column": "status", "equals": "paid", "tables": ["public.orders"]}],
        "transforms": [{"rename": {"n": "amount"}, "tables": ["public.items"]}],
    }
    code, found = check(tmp_path, database.uri, ["public.*"], copy, **shape)
    assert code == 0, found
    (warning,) = [message for name, message in findings(found, "warning") if name == "filter"]
    assert "does not send it (status), which the filters of stream shop need" in warning
    wrong = {
        "match": [{"column": "status", "equals": "paid"}, {"column": "id", "in": [1], "tables": ["public.order"]}],
        "transforms": [{"mask": "id", "tables": ["public.orders"]}],
    }
    code, found = check(tmp_path, database.uri, ["public.*"], copy, **wrong)
    assert code == 1
    assert sorted(message for name, message in findings(found, "error") if name == "transforms") == [
        "stream shop: equals: public.items has no column status",
        "stream shop: mask: public.orders.id is part of the key, without which a mirror cannot tell rows apart",
        "stream shop: no table of it is meant by public.order",
    ]


def target_told(found: Json) -> list[tuple[str, str, str | None]]:
    told = [one for one in found["findings"]["shop"] if one["check"] == "target"]
    return [(one["severity"], one["message"], one["fix"]) for one in told]


def test_a_target_that_cannot_be_written_to_is_named(tmp_path: Path, database: Database) -> None:
    database.sql("CREATE TABLE orders (id int PRIMARY KEY)")
    role = f"writer_{database.name}"
    database.sql(f"CREATE ROLE {role} LOGIN")
    try:
        uri = database.server.uri(database.name, role)
        copy = {"name": "copy", "kind": "postgres", "uri": uri}
        code, found = check(tmp_path, database.uri, ["public.orders"], copy)
        grant = f'GRANT CREATE ON DATABASE "{database.name}" TO "{role}"'
        wrong = f"shop/copy: role {role} may not create the schema _millstream in database {database.name}"
        assert (code, target_told(found)) == (1, [("error", wrong, grant)])
        database.sql(grant)
        code, found = check(tmp_path, database.uri, ["public.orders"], copy)
        right = f"shop/copy: connected to 127.0.0.1:{database.server.port}/{database.name} as {role}"
        assert (code, target_told(found)) == (0, [("ok", right, None)])
    finally:
        database.sql(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")
    closed = {"name": "copy", "kind": "postgres", "uri": "postgresql://app@127.0.0.1:1/shop"}
    code, found = check(tmp_path, database.uri, ["public.orders"], closed)
    ((severity, said, fix),) = target_told(found)
    assert (code, severity, fix) == (1, "error", "is the server up, and is the host of the uri right?")
    assert said == "shop/copy: cannot connect to 127.0.0.1:1/shop: Connection refused"


def test_a_target_whose_path_does_not_do_is_named(tmp_path: Path, database: Database) -> None:
    database.sql("CREATE TABLE orders (id int PRIMARY KEY)")
    (tmp_path / "file").write_text("")
    (tmp_path / "directory").mkdir()
    wanted = {
        ("files", "file"): ("file is a file", "give the path of a directory"),
        ("delta", "file/lake"): ("file is a file", "give the path of a directory"),
        ("sqlite", "directory"): ("directory is a directory", "give the path of a file"),
        ("duckdb", "none/copy.db"): ("none does not exist", f"mkdir -p {tmp_path}/none"),
        ("files", "none/log"): ("none/log can be written to", None),
    }
    for (kind, path), (said, fix) in wanted.items():
        code, found = check(
            tmp_path, database.uri, ["public.orders"], {"name": "copy", "kind": kind, "path": f"./{path}"}
        )
        ((_, message, told),) = target_told(found)
        assert (code, told, message.endswith(f"{tmp_path}/{said}")) == (int(fix is not None), fix, True), message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory", "file", "shop.yaml"]


def test_streams_on_one_source_are_checked_with_the_tables_of_all(tmp_path: Path, database: Database) -> None:
    database.sql("CREATE TABLE orders (id int PRIMARY KEY); CREATE TABLE items (id int PRIMARY KEY)")
    source = {"name": "main", "kind": "postgres", "uri": database.uri}
    for name in ("orders", "items", "nothing"):
        stream = {
            "name": name,
            "source": {**source, "tables": [f"public.{name}"]},
            "mode": "cdc",
            "targets": [{**FILES, "path": f"./{name}"}],
        }
        (tmp_path / f"{name}.yaml").write_text(json.dumps(stream))
    files = {name: str(tmp_path / f"{name}.yaml") for name in ("orders", "items", "nothing")}
    home = ("--home", str(tmp_path / "home"))

    def told(*words: str) -> list[str]:
        found = json.loads(CliRunner().invoke(app, ["check", "--connect", "--json", *words]).stdout)
        return [one["message"] for one in found["findings"]["main"] if one["check"] == "tables"]

    assert told(files["nothing"], files["items"], *home)[0] == "table public.nothing does not exist"
    assert told(files["items"], *home) == ["1 to capture: public.items"]
    assert CliRunner().invoke(app, ["apply", files["orders"], *home]).exit_code == 0
    assert told(files["items"], *home) == ["2 to capture: public.items, public.orders"]
