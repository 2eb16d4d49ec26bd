"""Whether a target is held up by others of its stream: one that hangs, and one whose every answer takes 20 seconds.

All three deliver first. Then the lines to two of them, databases behind a `Proxy`, become bad, while the load goes on;
the lag of the third is seen by a second process. At the end the lines are good again, and all must have everything.
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from millstream.bench import content, stream
from millstream.bench.apart import Apart, apart
from millstream.bench.frame import Settings
from millstream.bench.live import CHANGES_A_SECOND, Live, another_server, fresh_database, live, room, slot_is_read
from millstream.bench.proxy import Proxy
from millstream.bench.rig import PUBLICATION, SETTINGS, SLOT, await_true
from millstream.bench.sight import lags, reader
from millstream.embedded import EmbeddedPostgres
from millstream.embedded.postgres import HOST
from millstream.model import Json

SECONDS = 60.0
ANSWER_SECONDS = 20.0
MUST_MS = 2_000.0
THIRD: Json = {"max_ms": "200ms"}


def run(settings: Settings) -> Json:
    """One run; `value` is the longest lag that any change had at the third target."""
    seconds = settings.seconds or SECONDS
    settings.steps.plan(2)
    with ExitStack() as stack:
        directory = stack.enter_context(room())
        settings.steps.step("starting")
        server = stack.enter_context(EmbeddedPostgres(directory / "data", settings=SETTINGS))
        other = another_server(stack)
        with live(server, "isolation", directory / "isolation") as base:
            settings.steps.step("one target hangs, another is slow")
            found = _measure(base, other, seconds)
    return {
        "name": "isolation",
        "value": found["max"],
        "unit": "ms at most",
        "baseline": "what it may be",
        "baseline_value": MUST_MS,
        "ratio": round(MUST_MS / max(found["max"], 1.0), 3),
        "must": f"{MUST_MS:g} ms",
        "reached": found["max"] <= MUST_MS,
        "rows": round(seconds * CHANGES_A_SECOND),
        "equal": found["equal"],
        "runs": [found],
    }


def _measure(base: Live, other: EmbeddedPostgres, seconds: float) -> Json:
    lake = base.directory / "lake"
    with ExitStack() as stack:
        copies, targets, lines = {}, {}, {}
        for name in ("hangs", "slow"):
            copies[name], _ = stack.enter_context(fresh_database(other, name))
            lines[name] = stack.enter_context(Proxy(HOST, other.port))
            uri = f"postgresql://postgres@{HOST}:{lines[name].port}/{name}"
            targets[name] = {"kind": "postgres", "uri": uri}
        targets["third"] = stream.files(lake, THIRD)
        file = stream.stream_file(base.directory, base.uri, {"slot": SLOT, "publication": PUBLICATION}, targets)
        engine = stack.enter_context(apart(file, base.directory))
        await_true(lambda: slot_is_read(base.connection), "capture runs", seconds=60)
        base.trickle(0.2)
        engine.await_delivered(base.changes, targets=len(targets))
        first = base.changes + 1
        lines["hangs"].stall()
        lines["slow"].delay = ANSWER_SECONDS
        with reader("names", lake / "_millstream" / "commits") as looks:
            pace = base.trickle(seconds)
            engine.await_delivered(base.changes, "third")
        _, waited = lags(engine.journal, looks, first, base.changes)
        behind = [name for name in lines if not engine.has_delivered(base.changes, name)]
        _recover(engine, base, list(lines.values()))
        equal = content.changelog_equals(lake, base.connection, base.changes) and all(
            content.copies_equal(base.connection, copy) for copy in copies.values()
        )
    p50, p99, longest = (round(float(at), 1) for at in np.percentile(waited, [50, 99, 100]))
    return {
        "p50": p50,
        "p99": p99,
        "max": longest,
        "behind_meanwhile": behind,
        "changes_a_second": round(pace),
        "equal": equal and len(waited) == base.changes - first + 1,
    }


def _recover(engine: Apart, base: Live, lines: list[Proxy]) -> None:
    """Good lines again: everybody gets the rest."""
    for line in lines:
        line.release()
    engine.await_delivered(base.changes, seconds=300)
