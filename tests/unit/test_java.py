"""Which Java is taken, and what is said about one that is not. The programs here are small scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.errors import DependencyError
from millstream.spark.java import HINT, find_java

GOOD = ["java.base@17.0.15", "jdk.incubator.vector@17.0.15"]


def fake_java(home: Path, version: str = "17.0.15", modules: list[str] | None = None) -> Path:
    """A `java` below `home` that answers as the real one does; its home is returned."""
    settings = ["Property settings:", f"    java.home = {home}", f"    java.version = {version}"]
    said = [f"openjdk {version} 2025-04-15", *(GOOD if modules is None else modules)]
    lines = [
        "#!/bin/sh",
        "echo 'Picked up JAVA_TOOL_OPTIONS: -Dx=y' >&2",
        *[f"echo '{line}' >&2" for line in settings],
        *[f"echo '{line}'" for line in said],
    ]
    return script(home, "\n".join(lines))


def script(home: Path, text: str) -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(text + "\n")
    program.chmod(0o755)
    return home


def environment(java_home: Path | None = None, on_path: Path | None = None) -> dict[str, str]:
    found = {"PATH": f"{on_path}/bin:/usr/bin:/bin" if on_path else "/nonexistent"}
    return {**found, "JAVA_HOME": str(java_home)} if java_home else found


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A directory with a space in its name, so that every test has one."""
    return tmp_path / "a place with spaces"


def test_java_home_comes_first(tools: Path) -> None:
    ours, other = fake_java(tools / "ours", "21.0.2"), fake_java(tools / "other")
    java = find_java(environment(ours, other))
    assert (java.home, java.version, java.major, java.origin) == (ours, "21.0.2", 21, "JAVA_HOME")
    assert str(java) == str(ours)


@pytest.mark.parametrize(
    ("version", "modules", "complaint"),
    [
        ("11.0.2", GOOD, "is version 11.0.2, too old"),
        ("17.0.15", ["java.base@17.0.15"], "lacks the module jdk.incubator.vector"),
    ],
)
def test_an_unfit_java_home_gives_way_to_the_path(
    tools: Path, version: str, modules: list[str], complaint: str
) -> None:
    unfit, fit = fake_java(tools / "unfit", version, modules), fake_java(tools / "fit")
    assert find_java(environment(unfit, fit)).home == fit
    with pytest.raises(DependencyError) as error:
        find_java(environment(unfit))
    assert error.value.message.endswith(f"{unfit}/bin/java (JAVA_HOME) {complaint}")
    assert error.value.hint == HINT


def test_an_ancient_java_is_named_by_its_version(tools: Path) -> None:
    text = '#!/bin/sh\n[ "$1" = -version ] || exit 1\necho \'openjdk version "1.8.0_402"\' >&2'
    with pytest.raises(DependencyError, match=r"is version 1\.8\.0_402, too old"):
        find_java(environment(script(tools / "old", text)))


def test_a_java_home_that_does_not_run_is_said(tools: Path) -> None:
    with pytest.raises(DependencyError, match=r"\(JAVA_HOME\) does not run"):
        find_java(environment(tools / "nothing here"))
    with pytest.raises(DependencyError, match=r"\(JAVA_HOME\) does not run"):
        find_java(environment(script(tools / "broken", "#!/bin/sh\nexit 3")))


def test_a_mute_java_is_not_taken(tools: Path) -> None:
    with pytest.raises(DependencyError, match="does not say its version"):
        find_java(environment(script(tools / "mute", "#!/bin/sh\nexit 0")))


def test_no_java_at_all() -> None:
    with pytest.raises(DependencyError, match="no java on the PATH and no JAVA_HOME"):
        find_java(environment())
