"""A hundred tables with ten changes a second each, for minutes: lag, files and memory of a stream that just runs.

The load runs inside the server, a hundred transactions a second, each with one change in ten tables. Every setting of
the stream is at its default. A second process sees how far the target is; the engine is a process of its own.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack

import numpy as np

from millstream.bench import content
from millstream.bench.apart import apart
from millstream.bench.frame import Settings
from millstream.bench.live import Live, another_server, fresh_database, live, room, slot_is_read
from millstream.bench.rig import PUBLICATION, SETTINGS, SLOT, await_true
from millstream.bench.sight import Looks, Milliseconds, lags, reader
from millstream.bench.stream import stream_file
from millstream.embedded import EmbeddedPostgres
from millstream.model import Json

SECONDS = 300.0
TABLES = tuple(f"bench.t{number:03d}" for number in range(1, 101))
EACH_SECOND = 10
"""Changes of a table, and tables in a transaction."""
ROUND = len(TABLES) // EACH_SECOND
"""Transactions after which every table has had one change."""
MUST_P99_MS = {"delta": 25_000.0, "postgres": 2_000.0}
MOST_FILES = 120
MOST_BYTES = 2_500_000_000
GROWTH = 0.05
"""Lag grows if a line through it rises by more than this share of the limit over the whole run."""
LOOK_SECONDS = 2.0
WARM_SECONDS = 10.0
"""The load runs this long before it counts."""
TARGET = "copy"


def run(settings: Settings) -> Json:
    """One run to one kind of target; `value` is the lag of the 99th percentile."""
    kind = settings.target if settings.target in MUST_P99_MS else "delta"
    seconds = settings.seconds or SECONDS
    settings.steps.plan(2)
    with ExitStack() as stack:
        directory = stack.enter_context(room())
        settings.steps.step("starting")
        server = stack.enter_context(EmbeddedPostgres(directory / "data", settings=SETTINGS))
        other = another_server(stack) if kind == "postgres" else None
        with live(server, "many", directory / "many", schema()) as base:
            settings.steps.step(f"{len(TABLES)} tables to {kind}")
            found = _to_postgres(base, other, seconds) if other else _to_delta(base, seconds)
    limit = MUST_P99_MS[kind]
    found["grows"] = found["slope_ms_a_second"] * seconds > GROWTH * limit
    fine = not found["grows"] and found["memory_bytes"] < MOST_BYTES and (found["files"] or 0) < MOST_FILES
    return {
        "name": f"tables --target {kind}",
        "value": found["p99"],
        "unit": "ms p99",
        "baseline": "what it may be",
        "baseline_value": limit,
        "ratio": round(limit / max(found["p99"], 1.0), 3),
        "must": f"p99 {limit:g} ms, not growing, under {MOST_FILES} files a table and {MOST_BYTES / 1e9:g} GB",
        "reached": found["p99"] <= limit and fine,
        "rows": found["rows"],
        "equal": found["equal"],
        "runs": [found],
        "notes": [_note(kind, found)],
    }


def _note(kind: str, found: Json) -> str:
    files = "" if found["files"] is None else f", {found['files']} files in the largest table"
    growth = f"{found['slope_ms_a_second']:+g} ms a second"
    minutes = ", ".join(f"{one / 1e3:.1f}" for one in found["p50_by_minute"])
    return (
        f"tables to {kind}: p50 {found['p50']:g} ms (by minute, in seconds: {minutes}), lag {growth}, "
        f"{found['memory_bytes'] / 1e9:.2f} GB{files}"
    )


def _to_delta(base: Live, seconds: float) -> Json:
    lake = base.directory / "lake"
    looking = reader("names", lake / "_millstream" / "commits")
    found = _measure(base, {"kind": "delta", "path": str(lake)}, looking, seconds)
    files = max(len(list((lake / table).glob("*.parquet"))) for table in TABLES)
    equal = content.lake_equals(lake, base.connection, TABLES)
    return found | {"files": files, "equal": found["equal"] and equal}


def _to_postgres(base: Live, other: EmbeddedPostgres, seconds: float) -> Json:
    with fresh_database(other, "copies") as (copy, uri):
        found = _measure(base, {"kind": "postgres", "uri": uri}, reader("cursor", uri), seconds)
        equal = content.copies_equal(base.connection, copy, TABLES)
    return found | {"files": None, "equal": found["equal"] and equal}


def _measure(base: Live, target: Json, looking: AbstractContextManager[Looks], seconds: float) -> Json:
    file = stream_file(base.directory, base.uri, {"slot": SLOT, "publication": PUBLICATION}, {TARGET: target})
    warm, rounds = (max(1, round(one * EACH_SECOND)) for one in (min(WARM_SECONDS, seconds), seconds))
    before, last = len(TABLES) * warm, len(TABLES) * (warm + rounds)
    with apart(file, base.directory) as engine:
        await_true(lambda: slot_is_read(base.connection), "capture runs", seconds=60)
        # The tables are made with their first change, which is not part of a steady state.
        _pace(base, 0, warm)
        engine.await_delivered(before)
        with looking as looks, ThreadPoolExecutor(1) as beside:
            began, load = time.monotonic(), beside.submit(_pace, base, warm, rounds)
            memory = [engine.memory()]
            while not wait([load], LOOK_SECONDS).done:
                memory.append(engine.memory())
            load.result()
            pace = len(TABLES) * rounds / (time.monotonic() - began)
            engine.await_delivered(last)
        committed, waited = lags(engine.journal, looks, before + 1, last)
    p50, p99, longest = (round(float(at), 1) for at in np.percentile(waited, [50, 99, 100]))
    return {
        "rows": last - before,
        "p50": p50,
        "p99": p99,
        "max": longest,
        "slope_ms_a_second": round(float(np.polyfit(committed / 1e3 - committed[0] / 1e3, waited, 1)[0]), 3),
        "p50_by_minute": _by_minute(committed, waited),
        "memory_bytes": max(memory),
        "changes_a_second": round(pace),
        "equal": len(waited) == last - before,
    }


def _by_minute(committed: Milliseconds, waited: Milliseconds) -> list[float]:
    """The median of the lags of what was committed in each minute, the last of which may be short."""
    minutes = ((committed - committed[0]) // 60_000).astype(int)
    return [round(float(np.median(waited[minutes == minute])), 1) for minute in np.unique(minutes)]


def _pace(base: Live, first: int, rounds: int) -> None:
    """A change in every table, so many times, so many times a second."""
    base.connection.execute(
        "CALL bench.pace(%s, %s, %s)", (first * ROUND, (first + rounds) * ROUND - 1, ROUND * EACH_SECOND)
    )


def schema() -> str:
    """Tables, and `bench.pace(first transaction, last transaction, transactions a second)`.

    Transaction i is the n-th of its ten tables. Of ten changes of a table six are inserts, three update a row of
    the last ten, one deletes the first of them.
    """
    tables = [
        f"CREATE TABLE {table} (id bigint PRIMARY KEY, amount numeric(12,2), note text, changed timestamptz);"
        for table in TABLES
    ]
    return "\n".join(["CREATE SCHEMA bench;", *tables, *map(_step, range(ROUND)), _pacing()])


def _step(group: int) -> str:
    """The change of ten tables: statements of their own, so that each has a plan that the session keeps."""
    mine = TABLES[group * EACH_SECOND : (group + 1) * EACH_SECOND]
    put = [f"INSERT INTO {table} VALUES (n, n / 100.0, md5(n::text), clock_timestamp());" for table in mine]
    touch = [f"UPDATE {table} SET amount = amount + 1, changed = clock_timestamp() WHERE id = n - 6;" for table in mine]
    take = [f"DELETE FROM {table} WHERE id = n - 9;" for table in mine]
    return f"""
CREATE FUNCTION bench.step{group}(n bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF n % 10 < 6 THEN {" ".join(put)}
    ELSIF n % 10 < 9 THEN {" ".join(touch)}
    ELSE {" ".join(take)}
    END IF;
END $$;"""


def _pacing() -> str:
    calls = "\n".join(
        f"        {'IF' if group == 0 else 'ELSIF'} i % {ROUND} = {group} THEN PERFORM bench.step{group}(i / {ROUND});"
        for group in range(ROUND)
    )
    return f"""
CREATE PROCEDURE bench.pace(first bigint, last bigint, a_second float8) LANGUAGE plpgsql AS $$
DECLARE
    began timestamptz := clock_timestamp();
BEGIN
    FOR i IN first .. last LOOP
        PERFORM pg_sleep_until(began + (i - first) / a_second * interval '1 s');
{calls}
        END IF;
        COMMIT;
    END LOOP;
END $$;
"""
