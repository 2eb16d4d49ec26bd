"""Secrets: found by reference, shown by nobody."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from millstream.errors import SecretError
from millstream.secrets import Secret, redact, resolve


def test_an_environment_variable_is_read_at_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_TEST_PASSWORD", "first")
    assert resolve("env:MS_TEST_PASSWORD").reveal() == "first"
    monkeypatch.setenv("MS_TEST_PASSWORD", "second\n")
    assert resolve("env:MS_TEST_PASSWORD").reveal() == "second\n"


@pytest.mark.parametrize(
    ("content", "secret"),
    [
        (b"plain", "plain"),
        (b"line\n", "line"),
        (b"two\n\n", "two\n"),
        (b"dos\r\n", "dos"),
        ("pässwörd ".encode(), "pässwörd "),
    ],
)
def test_one_newline_at_the_end_of_a_file_is_no_part_of_the_secret(tmp_path: Path, content: bytes, secret: str) -> None:
    file = tmp_path / "password"
    file.write_bytes(content)
    assert resolve(f"file:{file}").reveal() == secret


def test_every_failure_names_the_reference_and_not_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MS_TEST_PASSWORD", raising=False)
    monkeypatch.setenv("MS_TEST_EMPTY", "")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "zero").write_bytes(b"a\0b")
    for reference, said in {
        "env:MS_TEST_PASSWORD": "the environment variable MS_TEST_PASSWORD is not set",
        "env:MS_TEST_EMPTY": "the secret behind env:MS_TEST_EMPTY is empty",
        "env:": "auth_ref env: names nothing",
        f"file:{tmp_path}/none": f"the secret file {tmp_path}/none does not exist",
        f"file:{tmp_path}": f"the secret file {tmp_path} cannot be read: Is a directory",
        f"file:{tmp_path}/binary": f"the secret file {tmp_path}/binary is not UTF-8 text",
        f"file:{tmp_path}/zero": f"the secret behind file:{tmp_path}/zero contains a zero byte",
    }.items():
        with pytest.raises(SecretError) as caught:
            resolve(reference)
        assert caught.value.message == said


@pytest.mark.parametrize("pasted", ["hunter2", "vault:hunter2", "ENV:hunter2"])
def test_a_password_pasted_as_reference_is_not_repeated(pasted: str) -> None:
    with pytest.raises(SecretError) as caught:
        resolve(pasted)
    assert "hunter2" not in str(caught.value)
    assert caught.value.hint == "write env:NAME or file:PATH"


def test_a_secret_does_not_show_itself() -> None:
    secret = Secret("hunter2")
    assert (str(secret), repr(secret), f"{secret}") == ("Secret(***)", "Secret(***)", "Secret(***)")
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(secret)


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("postgresql://app@db/shop", "postgresql://app@db/shop"),
        ("postgresql://app:hunter2@db:5432/shop?x=1", "postgresql://app:***@db:5432/shop?x=1"),
        ("postgresql://app:hun@ter/2@db/shop", "postgresql://app:***@db/shop"),
        ("postgresql://:hunter2@db/shop", "postgresql://:***@db/shop"),
        ("postgresql://db/shop?user=a&password=hunter2&sslmode=require", "postgresql://db/shop?user=a&password=***&sslmode=require"),
        ("host=db password='hun ter\\'2' user=a", "host=db password=*** user=a"),
        ("host=db sslpassword = hunter2", "host=db sslpassword = ***"),
    ],
)  # fmt: skip
def test_a_shown_uri_has_no_password(uri: str, shown: str) -> None:
    assert redact(uri) == shown
