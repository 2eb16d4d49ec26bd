"""Passwords and other secrets in stream files, and targets that have some: none is ever shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millstream.config import Problem, StreamFileError, load_streams
from millstream.config.definition import definition
from millstream.model import BatchLimits
from tests.fixtures.stream_files import Load, Problems, changed, stream_file

COPY = "{name: log, kind: files, path: ./log}", "{name: copy, kind: postgres, uri: 'postgresql://app@other/shop'}"


@pytest.mark.parametrize(
    "uri",
    [
        "postgresql://app:hunter2@localhost/shop",
        "postgresql://localhost/shop?user=app&password=hunter2",
        "postgresql://app@localhost/shop?sslpassword=hunter2&sslmode=require",
    ],
)
def test_a_password_in_the_uri_is_warned_of_and_never_shown(tmp_path: Path, uri: str) -> None:
    (tmp_path / "shop.yaml").write_text(json.dumps(stream_file("shop", uri=uri)))
    warnings: list[Problem] = []
    (stream,) = load_streams([tmp_path / "shop.yaml"], on_warning=warnings.append)
    assert [warning.message for warning in warnings] == ["a password stands in the URI"]
    assert "auth_ref: env:NAME" in (warnings[0].hint or "")
    assert stream.source.uri == uri
    for shown in (str(warnings), json.dumps(definition(stream)), repr(stream)):
        assert "hunter2" not in shown


def test_a_password_in_two_places_is_refused(tmp_path: Path) -> None:
    stream = stream_file("shop", uri="postgresql://app:hunter2@localhost/shop", auth_ref="env:PW")
    (tmp_path / "shop.yaml").write_text(json.dumps(stream))
    with pytest.raises(StreamFileError, match="a password stands in the URI and `auth_ref` names another") as raised:
        load_streams([tmp_path / "shop.yaml"])
    assert "hunter2" not in str(raised.value)


def test_secrets_in_the_wrong_place_do_not_appear_in_messages(problems: Problems) -> None:
    text = changed(
        ("  tables:", "  auth_ref: hunter2\n  max_source_wal: ${SECRET}\n  tables:"),
        ("postgresql://app@localhost:5432/shop", "host=x password=hunter2"),
        ("mode: cdc", "mode: ${SECRET}"),
    )
    found = problems(text, SECRET="swordfish")
    assert len(found) == 4
    assert "hunter2" not in str(found)
    assert "swordfish" not in str(found)
    assert "'${SECRET}' is not a size" in str(found)


def test_a_key_in_the_url_for_snapshots_is_refused_and_not_shown(problems: Problems) -> None:
    of_sqlite = ("{name: log, kind: files, path: ./log}", "{name: log, kind: sqlite, path: ./log.db}")
    text = changed(of_sqlite) + "snapshots: {path: 's3://${KEYS}@bucket/kept', every: 1h}\n"
    (said,) = problems(text, KEYS="AKIA:hidden/hidden")
    assert said.startswith("9:19: snapshots.path: a key or password seems to stand in the s3:// URL for snapshots")
    assert "AWS_ACCESS_KEY_ID" in said
    assert not any(word in said for word in ("hidden", "AKIA"))


def test_a_database_as_a_target(load: Load, tmp_path: Path) -> None:
    (stream,) = load(changed((COPY[0], COPY[1].replace("}", ", auth_ref: 'file:secret', deletes: soft}"))))
    (target,) = stream.targets
    assert dict(target.options) == {
        "uri": "postgresql://app@other/shop",
        "auth_ref": f"file:{tmp_path / 'secret'}",
        "deletes": "soft",
    }
    assert target.limits == BatchLimits(max_ms=200, max_bytes=64 << 20, max_events=500_000)


def test_a_target_s_uri_is_checked(problems: Problems) -> None:
    wrong = changed((COPY[0], COPY[1].replace("postgresql://app@other/shop", "mysql://app@other/shop")))
    assert problems(wrong) == ["8:39: targets[0].uri: not a postgres URI; write postgresql://user@host:port/database"]
    both = changed((COPY[0], COPY[1].replace("app@", "app:pw@").replace("}", ", auth_ref: env:X}")))
    assert "auth_ref` names another" in problems(both)[0]
    pasted = changed((COPY[0], COPY[1].replace("}", ", auth_ref: hunter2}")))
    assert "given by reference" in problems(pasted)[0]
    assert "hunter2" not in problems(pasted)[0]


def test_the_password_of_a_target_is_never_shown(tmp_path: Path) -> None:
    (tmp_path / "shop.yaml").write_text(changed((COPY[0], COPY[1].replace("app@", "app:hunter2@"))))
    warnings: list[Problem] = []
    (stream,) = load_streams([tmp_path / "shop.yaml"], on_warning=warnings.append)
    assert [warning.message for warning in warnings] == ["a password stands in the URI"]
    for shown in (str(warnings), json.dumps(definition(stream)), repr(stream)):
        assert "hunter2" not in shown
    assert "hunter2" in stream.targets[0].options["uri"]
