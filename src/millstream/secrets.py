"""Passwords by reference: a stream file names where a secret is, never the secret itself.

`env:NAME` reads an environment variable and `file:PATH` a file, both at the time of each use, so
that a rotated password is picked up by the next connection.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from millstream.errors import SecretError

_HINT = "write env:NAME or file:PATH"
_PLACE = "put the secret there, readable for whoever runs millstream, or correct the path"
_USERINFO = re.compile(r"(?<=://)([^:/?#@\s]*):.*@", re.DOTALL)
_KEYWORD = re.compile(r"(?i)((?:ssl)?password\s*=\s*)(?:'(?:[^'\\]|\\.)*'|[^\s&]+)")


class Secret:
    """A secret that does not show itself: only `reveal()` gives the value."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "Secret(***)"

    __str__ = __repr__

    def __reduce__(self) -> tuple[object, ...]:
        # A secret is resolved where it is used; written to disk or sent away it would be out of our hands.
        raise TypeError("a secret cannot be pickled; send its reference instead")


def resolve(auth_ref: str) -> Secret:
    """Read the secret that `auth_ref` names. Raises SecretError, which never contains the secret.

    One newline at the end of a file is not part of the secret; everything else is.
    """
    kind, colon, name = auth_ref.partition(":")
    if not colon or kind not in ("env", "file"):
        # The whole reference stays out of the message: people paste the password itself here.
        raise SecretError("auth_ref is not a reference to a secret", hint=_HINT)
    if not name:
        raise SecretError(f"auth_ref {kind}: names nothing", hint=_HINT)
    value = _from_environment(name) if kind == "env" else _from_file(Path(name).expanduser())
    if not value:
        raise SecretError(f"the secret behind {auth_ref} is empty")
    if "\0" in value:
        raise SecretError(f"the secret behind {auth_ref} contains a zero byte")
    return Secret(value)


def redact(uri: str) -> str:
    """The connection string as it may be shown: passwords replaced by `***`, the rest as it was."""
    return _KEYWORD.sub(r"\1***", _USERINFO.sub(r"\1:***@", uri))


def _from_environment(name: str) -> str:
    try:
        return os.environ[name]
    except KeyError:
        raise SecretError(
            f"the environment variable {name} is not set",
            hint=f"export {name}=... where the command, or `millstream run`, is started",
        ) from None


def _from_file(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise SecretError(f"the secret file {path} does not exist", hint=_PLACE) from None
    except OSError as error:
        raise SecretError(f"the secret file {path} cannot be read: {error.strerror}", hint=_PLACE) from None
    except UnicodeDecodeError:
        raise SecretError(f"the secret file {path} is not UTF-8 text") from None
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\r\n") else text.removesuffix("\n")
