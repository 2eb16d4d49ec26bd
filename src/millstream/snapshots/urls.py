"""The paths and URLs at which snapshots may be kept, and what may stand in them. Opens nothing.

A URL is written down, in stream definitions and restores, and it is shown: no key may stand in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from millstream.errors import ConfigError

SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
"""URLs that pyarrow has file systems for; `file` is one of ours."""

S3_PARAMETERS = ("endpoint_override", "scheme", "region", "force_virtual_addressing", "tls_ca_file_path")
"""What may stand behind the question mark of an `s3://` URL, by the names that pyarrow has for it."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SECRET = re.compile(r"(?i)secret|password|token|signature|(^|_)(key|sig|sas)($|_)")
_WITHOUT_KEYS = (
    "take it out: keys come from the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3) or from the "
    "files of the store's own tools"
)

Problem = tuple[str, str]
"""What is wrong, and what to do. Nothing of the URL that may be a secret is repeated."""


def check_address(base: str | None) -> None:
    """Raise ConfigError for a path or URL at which no snapshot can be kept."""
    found = None if base is None else problem_with(base)
    if found is not None:
        raise ConfigError(found[0], hint=found[1])


def problem_with(base: str) -> Problem | None:
    """Why no snapshot can be kept at a path or URL; None if one can, for all that it says itself."""
    scheme, separator, _ = base.partition("://")
    if base and (not separator or scheme == "file"):
        return None
    if not base or scheme not in SCHEMES:
        kinds = f"give a path, or a URL that begins with one of: file, {', '.join(SCHEMES)}"
        where = f"at a URL of the kind {scheme}://" if re.fullmatch(r"[a-z0-9+.-]{1,12}", scheme) else "there"
        return f"snapshots cannot be kept {where}", kinds
    try:
        url = urlsplit(base)
        parameters = dict(parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query)))
    except ValueError:
        return f"the {scheme}:// URL for snapshots cannot be read", "write it as s3://bucket/prefix?name=value"
    if _has_key(url, parameters):
        return f"a key or password seems to stand in the {scheme}:// URL for snapshots", _WITHOUT_KEYS
    return _problem_of_s3(url, parameters) if scheme == "s3" else None


def _has_key(url: SplitResult, parameters: Mapping[str, str]) -> bool:
    # A secret with a slash in it ends what is before the @ too early: in s3:// an @ or : anywhere before the question
    # mark is taken for one.
    named = url.password is not None or (url.scheme == "s3" and not set("@:").isdisjoint(url.netloc + url.path))
    return named or any(_SECRET.search(name) or "@" in value for name, value in parameters.items())


def _problem_of_s3(url: SplitResult, parameters: Mapping[str, str]) -> Problem | None:
    form = "write it as s3://bucket/prefix, with signs that are not letters or digits percent-encoded"
    if not _BUCKET.fullmatch(url.netloc):
        return "the s3:// URL for snapshots begins with no name of a bucket", form
    if url.fragment or re.search(r"\s", url.path):
        return "the s3:// URL for snapshots has a space or # in it", form
    if not parameters.keys() <= set(S3_PARAMETERS):
        return "the s3:// URL for snapshots has a parameter that is not known", f"known are {', '.join(S3_PARAMETERS)}"
    if parameters.get("scheme", "https") not in ("http", "https"):
        return "the scheme of the s3:// URL for snapshots is neither http nor https", "write scheme=http, or leave it"
    if parameters.get("force_virtual_addressing", "true") not in ("true", "false"):
        return "force_virtual_addressing of the s3:// URL for snapshots is neither true nor false", "write true"
    return None


def s3_parts(base: str) -> tuple[str, str, dict[str, str]]:
    """Of an `s3://` URL that is right: its bucket, the path with the bucket, and the parameters."""
    url = urlsplit(base)
    path = f"{url.netloc}/{unquote(url.path).strip('/')}".rstrip("/")
    return url.netloc, path, dict(parse_qsl(url.query))


def below(base: str, name: str) -> str:
    """A name under a base, as people are shown it: without the parameters of a URL."""
    where = base.partition("?")[0] if "://" in base else base
    return f"{where.rstrip('/')}/{name}".rstrip("/")
