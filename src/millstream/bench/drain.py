"""From a slot to Parquet through Spark: the whole way, for one target and for three."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from millstream.bench import content, debezium, profile, recvlogical, stream
from millstream.bench.frame import BASELINE, OURS, Settings, Taken, Way, alternate, result
from millstream.bench.mix import Part, parts
from millstream.bench.processes import engine_cpu, spent
from millstream.bench.rig import PUBLICATION, SLOT, SOURCE, Backlog, Connection, Rig, rig
from millstream.engine.home import Home
from millstream.errors import ConfigError
from millstream.model import Json

CHANGES = 1_000_000
MUST = 1.5
FANOUT_MUST = 1.0
FANOUT_TARGETS = 3
RIVAL = "Debezium"
BATCH: Json = {"max_ms": "200ms"}
"""Files wait five seconds by default, or for 16 MiB; a backlog fills batches by itself, and its rest need not wait."""


def run(settings: Settings) -> Json:
    """One target; and Debezium beside us, where it can be had."""
    if settings.target != "files":
        from millstream.bench import mirrors

        return mirrors.run(settings)
    if settings.keys is not None:
        raise ConfigError("--keys is for mirrors", hint="add --target delta or --target postgres")
    return _run("drain", settings, targets=1, must=MUST, rival=settings.debezium)


def run_fanout(settings: Settings) -> Json:
    """The same with three targets of one stream."""
    return _run("fanout", settings, targets=FANOUT_TARGETS, must=FANOUT_MUST, rival=False)


def _run(name: str, settings: Settings, *, targets: int, must: float, rival: bool) -> Json:
    mix = parts(settings.rows or CHANGES)
    with ExitStack() as stack:
        made = stack.enter_context(rig(mix, settings.steps.step))
        stack.enter_context(stream.session(made.directory))

        def baseline(part: Part) -> Taken:
            return recvlogical.drain(made.of(part), made.directory / "baseline.out")

        def ours(part: Part) -> Taken:
            return drain(made, made.of(part), targets)

        ways: dict[str, Way] = {BASELINE: baseline, OURS: ours}
        if rival:
            ways |= _rival(made, settings, stack)
        warm_up(ways, mix, settings)
        rounds = alternate(mix, settings, ways)
        settings.steps.step("where the time goes")
        # The last run of ours was on the last part, and has left its journal.
        journal = Home(made.directory / "run" / "home").journal_path(SOURCE)
        last = profile.of(rounds, made.of(mix[-1]), journal, made.scratch("profile"))
    found = result(name, rounds, baseline=recvlogical.NAME, must=must) | {"profile": last}
    if RIVAL in ways:
        named = debezium.name()
        found["rivals"] = [result(name, rounds, baseline=named, must=debezium.MUST, against=RIVAL)]
    return found


def warm_up(ways: Mapping[str, Way], mix: Sequence[Part], settings: Settings) -> None:
    """A drain of each part that does not count, for those who run on a JVM: after one it still compiles itself."""
    for name, way in ways.items():
        if name != BASELINE:
            for part in mix:
                settings.steps.step(f"a first drain of {part.name}, to warm up {name}")
                way(part)


def _rival(made: Rig, settings: Settings, stack: ExitStack) -> dict[str, Way]:
    """Debezium as a further way; nothing, said aloud, where it cannot be had."""
    missing = debezium.missing()
    if missing is not None:
        settings.steps.note(f"Debezium is left out: {missing}")
        return {}
    process = stack.enter_context(debezium.Debezium(made.directory / "debezium.log"))
    return {RIVAL: lambda part: process.drain(made.of(part))}


def drain(made: Rig, backlog: Backlog, targets: int) -> Taken:
    """A drain into so many directories of Parquet, each of which must have everything."""
    scratch = made.scratch("run")
    lakes = {f"lake{number}": scratch / f"lake{number}" for number in range(1, targets + 1)}

    def equal(connection: Connection) -> bool:
        return all(content.changelog_equals(lake, connection, backlog.goal) for lake in lakes.values())

    return deliver(scratch, backlog, {name: stream.files(lake, BATCH) for name, lake in lakes.items()}, equal)


def deliver(
    scratch: Path,
    backlog: Backlog,
    targets: Mapping[str, Json],
    equal: Callable[[Connection], bool],
    ready: Callable[[], None] = lambda: None,
    target_cpu: Callable[[], float] | None = None,
) -> Taken:
    """Time from capture's connection to the server until the last batch of the last target is visible.

    `ready` is called before the clock starts; `equal` at the end, with a connection to the source. `target_cpu` says
    what a target that is no process of ours has used so far.
    """
    home = Home(scratch / "home").create()
    journal = home.journal_path(SOURCE)
    arrivals = stream.Arrivals(list(targets))
    file = stream.stream_file(scratch, backlog.uri, {"slot": SLOT, "publication": PUBLICATION}, targets)
    seconds, cpu = 0.0, {}
    with backlog.cut_off(journal) as line, backlog.connect() as connection:

        def used() -> dict[str, float]:
            others = {"server": backlog.server_cpu()} | ({"target": target_cpu()} if target_cpu else {})
            return engine_cpu() | others

        def conduct() -> None:
            nonlocal seconds, cpu
            # The stream has delivered before, and now waits for its server: nothing of its start is in the way.
            arrivals.await_seq(backlog.warm)
            ready()
            before = used()
            began = line.restore()
            seconds = arrivals.await_seq(backlog.goal) - began
            cpu = spent(before, used())

        stream.run(file, home, arrivals, conduct)
        exact = content.journal_equals(journal, backlog) and equal(connection)
    return Taken(seconds, exact, cpu, _extra(arrivals))


def _extra(arrivals: stream.Arrivals) -> Json:
    return {"batches": arrivals.batches} | ({"trouble": arrivals.trouble} if arrivals.trouble else {})
