"""Where snapshots may be kept, as far as a path or URL says it itself; what a server of S3 says, in our words."""

from __future__ import annotations

import pytest

from millstream.errors import ConfigError, SnapshotError, SnapshotsUnavailable
from millstream.snapshots.remote import RemoteFiles, explain, open_files
from millstream.snapshots.urls import below, check_address, problem_with, s3_parts

RIGHT = [
    "kept",
    "/kept?or=not",
    "file:///kept/a b@c:d",
    "s3://bucket",
    "s3://bucket/a/pre%20fix?region=eu-central-1",
    "s3://bucket/x?endpoint_override=127.0.0.1:9000&scheme=http&force_virtual_addressing=true&tls_ca_file_path=/ca.pem",
    "gs://bucket/x",
    "abfs://container@account.dfs.core.windows.net/x",
    "hdfs://user@host:8020/x",
]
KEY = "a key or password seems to stand in the"
WRONG = [
    ("", "cannot be kept there"),
    ("ftp://host/HIDDEN", "at a URL of the kind ftp://"),
    ("s3://KEY:HIDDEN@bucket/x", KEY),
    ("s3://HIDDEN@bucket/x", KEY),
    ("s3://KEY:HID/DEN@bucket/x", KEY),
    ("s3://KEY:HID/DEN", KEY),
    ("s3://bucket/x?secret_key=HIDDEN", KEY),
    ("s3://bucket/x?access_key=HIDDEN", KEY),
    ("s3://bucket/x?endpoint_override=http://KEY:HIDDEN@host", KEY),
    ("abfs://container:HIDDEN@account.dfs.core.windows.net/x", KEY),
    ("abfs://container@account.dfs.core.windows.net/x?sas_token=HIDDEN", KEY),
    ("s3:///x", "no name of a bucket"),
    ("s3://b\u00fccket/x", "no name of a bucket"),
    ("s3://bucket/a b", "a space or #"),
    ("s3://bucket/a#b", "a space or #"),
    ("s3://bucket/x?HIDDEN", "cannot be read"),
    ("s3://bucket/x?regoin=HIDDEN", "a parameter that is not known"),
    ("s3://bucket/x?scheme=ftp", "neither http nor https"),
    ("s3://bucket/x?force_virtual_addressing=yes", "neither true nor false"),
]


@pytest.mark.parametrize("base", RIGHT)
def test_a_place_that_may_be(base: str) -> None:
    assert problem_with(base) is None


@pytest.mark.parametrize(("base", "why"), WRONG)
def test_a_place_that_cannot_be_is_refused_and_not_repeated(base: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        open_files(base)
    assert refused.value.hint
    assert not any(part in str(refused.value) for part in ("HIDDEN", "HID/", "KEY:"))


def test_no_place_is_no_mistake() -> None:
    check_address(None)


def test_the_parts_of_a_url_and_how_it_is_shown() -> None:
    base = "s3://bucket/a/pre%20fix/?endpoint_override=127.0.0.1%3A9000&scheme=http"
    assert s3_parts(base) == (
        "bucket",
        "bucket/a/pre fix",
        {"endpoint_override": "127.0.0.1:9000", "scheme": "http"},
    )
    assert below(base, "shop/log") == "s3://bucket/a/pre%20fix/shop/log"
    assert below("/kept?/", "shop/log") == "/kept?/shop/log"
    files = open_files(base)
    assert isinstance(files, RemoteFiles)
    assert files.base == base, "another process opens it by this"


def test_what_a_server_says_is_told_in_words_of_our_own() -> None:
    said = "When listing objects under key 'HIDDEN/' in bucket 'b': AWS Error {} during ListObjectsV2 operation: HIDDEN"
    expected = {
        "NETWORK_CONNECTION": (SnapshotsUnavailable, "its server cannot be reached, or does not speak S3"),
        "SLOW_DOWN": (SnapshotsUnavailable, "its server asks for fewer requests"),
        "UNKNOWN (HTTP status 502)": (SnapshotsUnavailable, "its server failed (502)"),
        "UNKNOWN (HTTP status 418)": (SnapshotError, "its server says UNKNOWN (418)"),
        "ACCESS_DENIED": (SnapshotError, "access is denied"),
        "SIGNATURE_DOES_NOT_MATCH": (SnapshotError, "the secret key is not that of the access key"),
        "NO_SUCH_BUCKET": (SnapshotError, "there is no such bucket"),
    }
    for code, meant in expected.items():
        assert explain(OSError(said.format(code)))[:2] == meant
    assert explain(OSError("HIDDEN"))[:2] == (SnapshotError, "OSError")
