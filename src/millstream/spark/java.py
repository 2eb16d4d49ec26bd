"""Find a Java that can run Spark.

Fit means: it runs, is 17 or newer, and has the module `jdk.incubator.vector` (small runtimes that
Python packages carry have not, and Spark does not start on them). `JAVA_HOME` comes first, then
`java` on the PATH. `scripts/setup` applies the same test and can also install one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from millstream.errors import DependencyError

OLDEST = 17
MODULE = "jdk.incubator.vector"
HINT = (
    f"install Java {OLDEST} or newer (Debian and Ubuntu: apt-get install default-jre-headless), "
    "or set JAVA_HOME to one that is installed"
)
_SECONDS = 60


@dataclass(frozen=True)
class Java:
    """A Java that can run Spark. `str()` of it is its home, as JAVA_HOME wants it."""

    home: Path
    version: str
    origin: str
    """Where it was found: `JAVA_HOME` or `PATH`."""

    @property
    def major(self) -> int:
        return _major(self.version)

    def __str__(self) -> str:
        return str(self.home)


def find_java(environment: Mapping[str, str] | None = None) -> Java:
    """The first fit Java. Raises DependencyError, which says what is wrong with each that was seen."""
    environment = os.environ if environment is None else environment
    unfit = []
    for origin, program in _candidates(environment):
        found = _examine(program, origin, environment)
        if isinstance(found, Java):
            return found
        unfit.append(f"{program} ({origin}) {found}")
    seen = "; ".join(unfit) if unfit else "no java on the PATH and no JAVA_HOME"
    raise DependencyError(f"no Java that can run Spark: {seen}", hint=HINT)


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if home := environment.get("JAVA_HOME"):
        yield "JAVA_HOME", str(Path(home) / "bin" / "java")
    if program := shutil.which("java", path=environment.get("PATH", os.defpath)):
        yield "PATH", program


def _examine(program: str, origin: str, environment: Mapping[str, str]) -> Java | str:
    """The Java behind this program, or what makes it unfit."""
    # One start of the JVM tells all. Java 8 and older do not know the options, and only they fail.
    said = _run([program, "-XshowSettings:properties", "--show-version", "--list-modules"], environment)
    if said is None:
        old = _run([program, "-version"], environment)
        old_version = re.search(r'version "([^"]+)"', old or "")
        return f"is version {old_version[1]}, too old" if old_version else "does not run"
    version, home = _property(said, "java.version"), _property(said, "java.home")
    if version is None or home is None:
        return "does not say its version"
    if _major(version) < OLDEST:
        return f"is version {version}, too old"
    if not re.search(rf"^{re.escape(MODULE)}(@|$)", said, re.MULTILINE):
        return f"lacks the module {MODULE}"
    return Java(Path(home), version, origin)


def _run(command: list[str], environment: Mapping[str, str]) -> str | None:
    """Everything the program said, or None if it failed or could not be started."""
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _property(said: str, name: str) -> str | None:
    found = re.search(rf"^\s+{re.escape(name)} = (.+)$", said, re.MULTILINE)
    return found[1].strip() if found else None


def _major(version: str) -> int:
    """17 of "17.0.15" and "17-ea"; 8 of "1.8.0_402"."""
    numbers = [int(number) for number in re.findall(r"\d+", version)]
    if not numbers:
        return 0
    return numbers[1] if numbers[0] == 1 and len(numbers) > 1 else numbers[0]
