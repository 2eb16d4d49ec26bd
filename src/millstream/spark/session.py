"""Spark sessions as Millstream needs them.

Much of what makes a session right must be there before its JVM starts, so a session is built in one
place only. The JVM is a child of this process that ends when its standard input does: kill -9 of
this process takes it along. Its output goes to files under `home_spark_dir`, never to the terminal.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

import millstream
from millstream.errors import ConfigError, DependencyError
from millstream.memory import arrow_environment
from millstream.observe import Event, Level, Observer, Observers
from millstream.spark.archive import archive_options
from millstream.spark.distribution import is_ours, make_distribution, shared_distribution
from millstream.spark.format import ChangesSource
from millstream.spark.java import Java, find_java

_FOREIGN = ("SPARK_HOME", "SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "PYSPARK_GATEWAY_PORT")
"""Variables that would make us run on somebody else's Spark."""

_JAVA_OPTIONS = (
    "-XX:Tier4InvocationThreshold=500000",
    "-XX:Tier4MinInvocationThreshold=100000",
    "-XX:Tier4CompileThreshold=1500000",
    "-XX:Tier4BackEdgeThreshold=4000000",
)
"""A hundred times the default: Java optimises only what really runs hot, which is what handles rows. What plans a
batch would else be optimised for many minutes, at the cost of half of what Java uses; a single method of those that
look whether a job's functions can be sent takes it half a second."""

_FILE_MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"

_LOG4J = """\
status = error
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = {log}
appender.file.filePattern = {log}.%i
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{yyyy-MM-dd HH:mm:ss.SSS}} %p %c{{1}}: %m%n%ex
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 10MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 3
"""


def default_master() -> str:
    """All cores twice over, because delivery tasks wait for disks, with task retries (plain `local[*]` has none)."""
    return f"local[{max(4, 2 * (os.cpu_count() or 1))},4]"


def build_session(
    home_spark_dir: Path,
    master: str | None = None,
    app_name: str = "millstream",
    extra_conf: Mapping[str, str] | None = None,
    observer: Observer | None = None,
    java_options: Sequence[str] = (),
) -> SparkSession:
    """Start Spark for delivery, with everything it writes under `home_spark_dir`.

    Changes this process's environment (Spark reads much of its set-up from there). Raises
    DependencyError when there is no usable Java or the JVM does not start. There is one session per
    process: a second call while one is active returns it.
    """
    active = active_session()
    if active is not None:
        return active
    master = master or default_master()
    home = home_spark_dir.absolute()
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    java = find_java()
    _set_environment(home, master, java, observer or Observers())
    conf = SparkConf(loadDefaults=False)
    conf.setAll(list(_configuration(home, master, app_name, [*archive_options(java), *java_options]).items()))
    conf.setAll(list((extra_conf or {}).items()))
    if SparkContext._gateway is None:
        _start_jvm(conf, home)
    session = SparkSession.builder.config(conf=conf).getOrCreate()
    _offer_format(session)
    return session


def _offer_format(session: SparkSession) -> None:
    """Register the public format where Spark does not look for it: it asks a shell, unquoted, if its Python exists."""
    if shlex.quote(sys.executable) != sys.executable:
        session.dataSource.register(ChangesSource)


def active_session() -> SparkSession | None:
    """The session of this process, if it has one already, whoever started it."""
    return SparkSession.builder.getOrCreate() if SparkContext._active_spark_context is not None else None


_SETTLED = {
    "spark.master": "name it by --master",
    "spark.speculation": "a second copy of a task at the same time would only cost",
    "spark.python.daemon.module": "workers start with what a task needs already imported",
    "spark.sql.session.timeZone": "times are UTC",
    "spark.driver.extraJavaOptions": "set JDK_JAVA_OPTIONS in the environment instead",
    "spark.executorEnv.PYTHONPATH": "set PYTHONPATH in the environment instead",
    "spark.sql.streaming.checkpointFileManagerClass": "the kill tests hold for the one that is set",
}
"""Settings that are not the user's to change, and why."""


def user_settings(pairs: Sequence[str]) -> dict[str, str]:
    """Settings of Spark's as `KEY=VALUE` texts. Raises ConfigError for what is no such text or not to be changed."""
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.startswith("spark."):
            raise ConfigError(f"--conf {key}: not a setting of Spark's", hint="write --conf spark.some.key=value")
        if key in _SETTLED:
            raise ConfigError(f"--conf {key} cannot be changed", hint=_SETTLED[key])
        settings[key] = value
    return settings


def _set_environment(home: Path, master: str, java: Java, observer: Observer) -> None:
    for name in _FOREIGN:
        value = os.environ.get(name)
        if value and not (name == "SPARK_HOME" and is_ours(value)):
            del os.environ[name]
            message = f"{name}={value} is ignored: Millstream runs on the pyspark of its own Python"
            observer.on_event(Event("spark.environment_ignored", message, Level.WARNING, fields={"variable": name}))
    os.environ["JAVA_HOME"] = str(java)
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = _python_path()
    os.environ.pop("SPARK_HOME", None)
    if master.startswith("local"):
        os.environ["SPARK_HOME"] = str(_distribution(home, master))
        os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"


def _distribution(home: Path, master: str) -> Path:
    shared = shared_distribution()
    # The workers of `local-cluster` write into it.
    own = master.startswith("local-cluster") or not is_ours(str(shared))
    return make_distribution(home / "distribution") if own else shared


def _python_path() -> str:
    """PYTHONPATH with the directory that holds `millstream` in front, for a package that is not installed."""
    package_root = str(Path(millstream.__file__).parent.parent)
    rest = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != package_root]
    return os.pathsep.join([package_root, *rest])


def _configuration(home: Path, master: str, app_name: str, java_options: Sequence[str]) -> dict[str, str]:
    scratch = home / "tmp"
    log4j = home / "log4j2.properties"
    log4j.write_text(_LOG4J.format(log=home / "spark.log"))
    places = [f"-Dlog4j2.configurationFile={log4j.as_uri()}", f"-Djava.io.tmpdir={scratch}"]
    options = [*_JAVA_OPTIONS, *places, *java_options]
    conf = {
        "spark.master": master,
        "spark.app.name": app_name,
        "spark.local.dir": str(scratch),
        "spark.sql.warehouse.dir": str(home / "warehouse"),
        "spark.driver.extraJavaOptions": " ".join(f'"{option}"' for option in options),
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.structuredLogging.enabled": "false",
        # A retried task stages under another name; a second copy at the same time would only cost.
        "spark.speculation": "false",
        "spark.python.daemon.module": "millstream.spark.daemon",
        "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"],
        # Each batch is one job of known shape: nothing to adapt, and adapting costs a second plan.
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.adaptive.streaming.stateless.enabled": "false",
        "spark.sql.streaming.checkpointFileManagerClass": _FILE_MANAGER,
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        "spark.sql.streaming.minBatchesToRetain": "10",
        # What a driver that lives for months remembers of its past.
        "spark.sql.streaming.numRecentProgressUpdates": "5",
        "spark.sql.streaming.ui.enabled": "false",
        "spark.sql.ui.retainedExecutions": "10",
        "spark.ui.retainedJobs": "50",
        "spark.ui.retainedStages": "50",
        "spark.ui.retainedTasks": "500",
        "spark.worker.ui.retainedExecutors": "10",
    }
    conf |= {f"spark.executorEnv.{name}": value for name, value in arrow_environment().items()}
    if master.startswith("local"):
        conf["spark.driver.host"] = conf["spark.driver.bindAddress"] = "127.0.0.1"
    return conf


def _start_jvm(conf: SparkConf, home: Path) -> None:
    """Start the gateway ourselves, so that the JVM's own words go to a file and Ctrl-C stays with us."""
    output = home / "jvm.out"
    with output.open("wb") as sink:
        try:
            options = {"stdout": sink, "stderr": sink, "start_new_session": True}
            gateway = launch_gateway(conf, options)  # type: ignore[no-untyped-call]
        except PySparkException as failed:
            lines = output.read_text(errors="replace").strip().splitlines()
            said = lines[-1] if lines else "it said nothing"
            raise DependencyError(
                f"Spark's Java process did not start: {said}",
                hint=f"see {output}; `millstream doctor` checks Java and memory",
            ) from failed
    SparkContext._ensure_initialized(gateway=gateway)
