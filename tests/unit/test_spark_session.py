"""What is set before the JVM starts."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

import millstream
from millstream.spark import archive, session
from millstream.spark.distribution import is_ours, make_distribution
from millstream.spark.java import Java
from tests.fixtures.delivery import Watching

JAVA = Java(Path("/a java"), "17.0.15", "PATH")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The test's changes to the environment, and the session's, end with the test."""
    for name in ("SPARK_HOME", "SPARK_REMOTE", "SPARK_LOCAL_IP", "PYTHONPATH", "PYSPARK_PYTHON", "JAVA_HOME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYSPARK_DRIVER_PYTHON", "python-of-somebody")
    return monkeypatch


def test_a_foreign_spark_is_dropped_and_said_aloud(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("SPARK_HOME", "/opt/other")
    watching = Watching()
    session._set_environment(tmp_path, "local[4,4]", JAVA, watching)
    assert os.environ["SPARK_HOME"] != "/opt/other"
    assert is_ours(os.environ["SPARK_HOME"])
    (event,) = watching.of("spark.environment_ignored")
    assert event.message.startswith("SPARK_HOME=/opt/other is ignored")


def test_our_own_spark_of_an_earlier_session_is_not_foreign(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("SPARK_HOME", str(make_distribution(tmp_path / "earlier")))
    watching = Watching()
    session._set_environment(tmp_path, "spark://host:7077", JAVA, watching)
    assert watching.of("spark.environment_ignored") == []
    assert "SPARK_HOME" not in os.environ


def test_python_finds_no_zips_in_the_distribution(tmp_path: Path) -> None:
    for _ in range(2):
        made = make_distribution(tmp_path / "distribution")
    assert is_ours(str(made))
    assert not (made / "python").exists()
    (made / "jars").unlink()
    (made / "jars").symlink_to(tmp_path / "an environment that was moved")
    assert not is_ours(str(made))
    assert is_ours(str(make_distribution(made)))


def test_workers_get_this_python_and_find_this_package(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("PYTHONPATH", "/mine")
    session._set_environment(tmp_path, "local[4,4]", JAVA, Watching())
    assert os.environ["PYSPARK_PYTHON"] == os.environ["PYSPARK_DRIVER_PYTHON"] == sys.executable
    root = str(Path(millstream.__file__).parent.parent)
    assert os.environ["PYTHONPATH"] == f"{root}{os.pathsep}/mine"
    assert os.environ["JAVA_HOME"] == "/a java"


@pytest.mark.parametrize(("master", "address"), [("local[4,4]", "127.0.0.1"), ("spark://host:7077", None)])
def test_only_a_local_master_stays_on_this_host(
    environment: pytest.MonkeyPatch, tmp_path: Path, master: str, address: str | None
) -> None:
    session._set_environment(tmp_path, master, JAVA, Watching())
    assert os.environ.get("SPARK_LOCAL_IP") == address
    assert session._configuration(tmp_path, master, "test", []).get("spark.driver.host") == address


def test_workers_get_an_arrow_that_keeps_memory(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("PYTHONPATH", "/mine")
    environment.delenv("MIMALLOC_PURGE_DELAY", raising=False)
    assert (
        session._configuration(tmp_path, "local[4,4]", "test", [])["spark.executorEnv.MIMALLOC_PURGE_DELAY"] == "10000"
    )
    environment.setenv("MIMALLOC_PURGE_DELAY", "5")
    assert "spark.executorEnv.MIMALLOC_PURGE_DELAY" not in session._configuration(tmp_path, "local[4,4]", "test", [])


def test_everything_spark_writes_is_under_the_home(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("PYTHONPATH", "/mine")
    home = tmp_path / "a home"
    home.mkdir()
    conf = session._configuration(home, "local[4,4]", "test", ["-Done=a b", "-Dtwo"])
    for key in ("spark.local.dir", "spark.sql.warehouse.dir"):
        assert Path(conf[key]).is_relative_to(home)
    options = shlex.split(conf["spark.driver.extraJavaOptions"])
    assert f"-Djava.io.tmpdir={home / 'tmp'}" in options
    assert options[-2:] == ["-Done=a b", "-Dtwo"]
    assert str(home / "spark.log") in (home / "log4j2.properties").read_text()


def test_local_cluster_gets_a_distribution_of_links(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    session._set_environment(tmp_path, "local-cluster[2,1,1024]", JAVA, Watching())
    assert os.environ["SPARK_HOME"] == str(tmp_path / "distribution")
    assert (tmp_path / "distribution" / "jars").is_dir()
    assert not (tmp_path / "distribution" / "work").exists()


def test_the_default_master_retries_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert session.default_master() == "local[16,4]"
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert session.default_master() == "local[4,4]"


def test_an_archive_of_classes_is_used_if_there_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert archive.archive_options(JAVA) == []
    path = archive.archive_path(JAVA)
    path.parent.mkdir(parents=True)
    path.touch()
    assert f"-XX:SharedArchiveFile={path}" in archive.archive_options(JAVA)
    newer = Java(JAVA.home, "17.0.16", "PATH")
    assert archive.archive_options(newer) == [], "made by another Java"
