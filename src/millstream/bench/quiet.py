"""What a stream costs while nothing happens: processor time of all its processes, as a share of one core.

The stream is one of one target, with every setting at its default. It has delivered, and the database is left alone.
The clock starts when what a start leaves behind (compiling, settling) is over.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from millstream.bench import content, stream
from millstream.bench.apart import apart
from millstream.bench.frame import Settings
from millstream.bench.live import Live, live, room, slot_is_read
from millstream.bench.processes import Meter
from millstream.bench.rig import PUBLICATION, SETTINGS, SLOT, await_true
from millstream.embedded import EmbeddedPostgres
from millstream.model import Json

SECONDS = 60.0
SETTLE_SECONDS = 45.0
LOOK_SECONDS = 0.5
MUST = 3.0
"""Percent of a core."""


def run(settings: Settings) -> Json:
    """One run."""
    seconds = settings.seconds or SECONDS
    with ExitStack() as stack:
        directory = stack.enter_context(room())
        settings.steps.step("a quiet stream")
        server = stack.enter_context(EmbeddedPostgres(directory / "data", settings=SETTINGS))
        with live(server, "quiet", directory / "quiet") as base:
            found = _quiet(base, seconds)
    return {
        "name": "quiet",
        "value": found["percent"],
        "unit": "% of a core",
        "baseline": "what it may cost",
        "baseline_value": MUST,
        "ratio": round(MUST / max(found["percent"], 0.01), 3),
        "must": f"{MUST:g} %",
        "reached": found["percent"] <= MUST,
        "rows": 0,
        "equal": found["equal"],
        "runs": [found],
    }


def _quiet(base: Live, seconds: float) -> Json:
    lake = base.directory / "lake"
    file = stream.stream_file(
        base.directory, base.uri, {"slot": SLOT, "publication": PUBLICATION}, {"lake": stream.files(lake)}
    )
    with apart(file, base.directory) as engine:
        await_true(lambda: slot_is_read(base.connection), "capture runs", seconds=60)
        base.trickle(0.2)
        engine.await_delivered(base.changes)
        time.sleep(min(SETTLE_SECONDS, seconds))
        ours, server, began = engine.meter(), Meter(base.server.pid), time.monotonic()
        while (took := time.monotonic() - began) < seconds:
            time.sleep(min(LOOK_SECONDS, seconds - took))
            ours.look()
            server.look()
    return {
        "seconds": round(took, 2),
        "percent": round(sum(ours.spent().values()) / took * 100, 2),
        "cpu_seconds": ours.spent(),
        "server_percent": round(sum(server.spent().values()) / took * 100, 2),
        "equal": content.changelog_equals(lake, base.connection, base.changes),
    }
