"""From a slot to the journal: the capture process against `pg_recvlogical`, on copies of one slot."""

from __future__ import annotations

from pathlib import Path

from millstream.bench import content, recvlogical
from millstream.bench.frame import Settings, Taken, alternate, result
from millstream.bench.mix import Part, parts
from millstream.bench.processes import cpu_seconds
from millstream.bench.rig import Backlog, Rig, await_true, await_value, rig, server_cpu
from millstream.engine.capture_order import CaptureOrder
from millstream.engine.supervisor import Supervisor
from millstream.errors import BenchFailed
from millstream.journal import JournalReader
from millstream.model import Json
from millstream.observe import Observers

CHANGES = 800_000
MUST = 0.95


def run(settings: Settings) -> Json:
    """Streaming, the whole mix."""
    mix = parts(settings.rows or CHANGES)
    with rig(mix, settings.steps.step) as made:

        def baseline(part: Part) -> Taken:
            return recvlogical.drain(made.of(part), made.directory / "baseline.out")

        def ours(part: Part) -> Taken:
            return drain(made, made.of(part))

        runs = alternate(mix, settings, baseline, ours)
    return result("capture", runs, baseline=recvlogical.NAME, must=MUST)


def drain(made: Rig, backlog: Backlog) -> Taken:
    """Time from capture's connection to the server until the last change is durable and visible in the journal."""
    journal = made.scratch("run") / "journal"
    with backlog.cut_off(journal) as line, backlog.connect() as connection:
        supervisor = Supervisor(CaptureOrder(backlog.source(catch_up="streaming"), journal), Observers())
        supervisor.start()
        try:
            # It finds the line cut and waits: from here on nothing of its own start is in the way.
            await_true(lambda: _state(supervisor) == "waiting", "capture is up", seconds=60)
            before = cpu_seconds(supervisor.pid or 0)
            began = line.restore()
            ended = _await_end(journal, backlog.goal, supervisor)
            used = cpu_seconds(supervisor.pid or 0) - before
            spent = {"server": round(server_cpu(connection), 2), "capture": round(used, 2)}
        finally:
            supervisor.stop()
    return Taken(ended - began, content.journal_equals(journal, backlog), spent)


def _await_end(journal: Path, goal: int, supervisor: Supervisor) -> float:
    """When the head that shows the last change was published, by the head's own word."""
    reader = JournalReader([str(journal)])

    def published() -> float | None:
        _state(supervisor)
        head = reader.head()
        return head.published_us / 1e6 if head is not None and head.seq >= goal else None

    return await_value(published, "the journal has the last change")


def _state(supervisor: Supervisor) -> str:
    if supervisor.state in ("halted", "stopped"):
        raise supervisor.error or BenchFailed("capture ended by itself")
    return supervisor.state
