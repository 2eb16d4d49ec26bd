"""Snapshots behind a URL: a file system of pyarrow's.

For S3 it is made here rather than by `FileSystem.from_uri`, which gives a server three seconds for an answer: to put a
large object together takes longer than that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from pyarrow import fs

from millstream.errors import ConfigError, SnapshotError, SnapshotsUnavailable
from millstream.snapshots.files import Files, LocalFiles
from millstream.snapshots.urls import below, check_address, s3_parts

CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 30.0
"""How long a server of S3 may take to accept a connection, and to say anything on it."""
TRIES = 3
READ_BYTES = 4 << 20
"""So much is asked for at a time: each read of a file at S3 is a request of its own."""

_SAID_BY_AWS = re.compile(r"AWS Error (\w+)(?: \(HTTP status (\d{3})\))?")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
"""Where one of these is set, nobody has to be asked for a bucket's region."""
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""Where the server is, if a URL does not say it: as `https://host:port`."""

_CHECK = "check the URL, the keys in the environment and what they may do"
_CHECK_KEYS = (
    "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment, or the files in ~/.aws, and what they may do"
)
_CHECK_SERVER = "is it up, and are endpoint_override, scheme and region of the URL right?"
_UNREACHABLE = {
    "NETWORK_CONNECTION": "its server cannot be reached, or does not speak S3",
    "REQUEST_TIMEOUT": "its server did not answer in time",
    "SERVICE_UNAVAILABLE": "its server is not available",
    "INTERNAL_FAILURE": "its server failed",
    "SLOW_DOWN": "its server asks for fewer requests",
    "THROTTLING": "its server asks for fewer requests",
}
_REFUSED = {
    "ACCESS_DENIED": "access is denied",
    "INVALID_ACCESS_KEY_ID": "the access key is not known there",
    "UNRECOGNIZED_CLIENT": "the access key is not known there",
    "INVALID_CLIENT_TOKEN_ID": "the access key or session token is not known there",
    "SIGNATURE_DOES_NOT_MATCH": "the secret key is not that of the access key",
    "INVALID_SIGNATURE": "the secret key is not that of the access key",
    "REQUEST_EXPIRED": "the keys have expired",
    "REQUEST_TIME_TOO_SKEWED": "the clock of this host is not that of the server",
}
_NO_BUCKET = "there is no such bucket"
_MAKE_BUCKET = "make it, or correct the URL; a bucket is never made for snapshots"


class RemoteFiles(Files):
    """A file system of pyarrow's."""

    def __init__(self, base: str, filesystem: fs.FileSystem, path: str) -> None:
        super().__init__(base)
        self._filesystem = filesystem
        self._path = path.rstrip("/")

    @contextmanager
    def _create(self, name: str) -> Iterator[IO[bytes]]:
        path = f"{self._path}/{name}"
        if not self._is_s3:
            self._filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        # What an error cuts off may be there all the same: only what a manifest names counts.
        with self._filesystem.open_output_stream(path) as file:
            yield file

    def _open(self, name: str) -> Any:
        return self._filesystem.open_input_stream(f"{self._path}/{name}", buffer_size=READ_BYTES)

    def _folders(self, name: str) -> list[str]:
        selector = fs.FileSelector(f"{self._path}/{name}".rstrip("/"), allow_not_found=True)
        found = self._filesystem.get_file_info(selector)
        if not found:
            self._check_bucket(name)
        return [one.base_name for one in found if one.type == fs.FileType.Directory]

    def _check_bucket(self, name: str) -> None:
        """A bucket that is not there is not one with nothing in it."""
        bucket = self._path.partition("/")[0]
        if self._is_s3 and self._filesystem.get_file_info(bucket).type == fs.FileType.NotFound:
            raise SnapshotError(f"cannot list {below(self.base, name)}: {_NO_BUCKET}", hint=_MAKE_BUCKET)

    def _remove(self, name: str) -> None:
        path = f"{self._path}/{name}"
        if self._filesystem.get_file_info(path).type != fs.FileType.NotFound:
            self._filesystem.delete_file(path)

    def _remove_folder(self, name: str) -> None:
        path = f"{self._path}/{name}"
        if self._filesystem.get_file_info(path).type != fs.FileType.NotFound:
            self._filesystem.delete_dir(path)

    @property
    def _is_s3(self) -> bool:
        """There are no directories in it, and none have to be made."""
        return str(self._filesystem.type_name) == "s3"

    def _explain(self, failed: OSError) -> tuple[type[SnapshotError], str, str]:
        return explain(failed)


def explain(failed: OSError) -> tuple[type[SnapshotError], str, str]:
    """What a file system of pyarrow's has said, in words of our own: its own may hold what stands in the URL."""
    said = _SAID_BY_AWS.search(str(failed))
    if said is None:
        return SnapshotError, failed.strerror or type(failed).__name__, _CHECK
    code, status = said[1], said[2] or ""
    if code in _UNREACHABLE or status.startswith("5"):
        return SnapshotsUnavailable, _UNREACHABLE.get(code, f"its server failed ({status})"), _CHECK_SERVER
    if code in _REFUSED:
        return SnapshotError, _REFUSED[code], _CHECK_KEYS
    if code == "NO_SUCH_BUCKET":
        return SnapshotError, _NO_BUCKET, _MAKE_BUCKET
    return SnapshotError, f"its server says {code}{f' ({status})' if status else ''}", _CHECK


def open_files(base: str) -> Files:
    """The files below a path or URL; creates nothing.

    Raises ConfigError for a URL that nobody can open, and SnapshotError where a bucket's region has to be asked for and
    nobody says it. `file:` URLs are taken literally, as Spark does: a percent sign or a space is just itself.
    """
    check_address(base)
    scheme, separator, rest = base.partition("://")
    if not separator or scheme == "file":
        return LocalFiles(Path("/" + rest.lstrip("/") if separator else base).absolute())
    if scheme == "s3":
        return _open_s3(base)
    try:
        filesystem, path = fs.FileSystem.from_uri(base)
    except (OSError, ValueError) as failed:
        # Its words may repeat the URL.
        where = urlsplit(base).hostname or scheme
        raise ConfigError(
            f"the file system of {scheme}://{where} cannot be opened: {type(failed).__name__}",
            hint="check the URL, the network and the credentials in the environment",
        ) from None
    return RemoteFiles(base, filesystem, path)


def _open_s3(base: str) -> RemoteFiles:
    bucket, path, given = s3_parts(base)
    elsewhere = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "")
    if "endpoint_override" not in given and "://" in elsewhere:
        scheme, _, endpoint = elsewhere.partition("://")
        given = {"scheme": scheme, **given, "endpoint_override": endpoint.rstrip("/")}
    region = given.get("region")
    if not (region or "endpoint_override" in given or any(os.environ.get(name) for name in _REGIONS)):
        region = _region_of(bucket)
    filesystem = fs.S3FileSystem(
        region=region,
        scheme=given.get("scheme"),
        endpoint_override=given.get("endpoint_override"),
        force_virtual_addressing=given.get("force_virtual_addressing") == "true",
        tls_ca_file_path=given.get("tls_ca_file_path"),
        connect_timeout=CONNECT_SECONDS,
        request_timeout=ANSWER_SECONDS,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=TRIES),
    )
    return RemoteFiles(base, filesystem, path)


def _region_of(bucket: str) -> str:
    try:
        return str(fs.resolve_s3_region(bucket))
    except OSError as failed:
        kind, why, hint = explain(failed)
        raise kind(f"cannot find out the region of bucket {bucket}: {why}", hint=hint) from None
