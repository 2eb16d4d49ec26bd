"""From a slot into mirrors through Spark: changes over a fixed number of keys, to Delta tables or another Postgres."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from millstream.bench import content, recvlogical, stream, subscription
from millstream.bench.drain import BATCH, CHANGES, deliver, warm_up
from millstream.bench.frame import BASELINE, OURS, Settings, Taken, Way, alternate, result
from millstream.bench.keyed import Keyed
from millstream.bench.live import another_server, fresh_database
from millstream.bench.mix import Part, parts
from millstream.bench.rig import Connection, Rig, rig, server_cpu
from millstream.embedded import EmbeddedPostgres
from millstream.model import Json

KEYS = 100_000
MUST_DELTA = 0.7
MUST_POSTGRES, MUST_MANY_KEYS = 1.0, 0.8
"""With as many keys as by default, and with more."""
TARGET = "copy"


def run(settings: Settings) -> Json:
    """Delta against the server's own reader, Postgres against its own replication."""
    mix, load = parts(settings.rows or CHANGES), Keyed(settings.keys or KEYS)
    with ExitStack() as stack:
        if settings.target == "delta":
            made = stack.enter_context(rig(mix, settings.steps.step, load=load))
            ways, baseline, must = _delta_ways(made), recvlogical.NAME, MUST_DELTA
        else:
            other = another_server(stack)
            made = stack.enter_context(
                rig(mix, settings.steps.step, load=load, at_base=partial(subscription.template, other))
            )
            ways, baseline = _postgres_ways(made, other), subscription.NAME
            must = MUST_POSTGRES if load.keys <= KEYS else MUST_MANY_KEYS
        stack.enter_context(stream.session(made.directory))
        warm_up(ways, mix[-1:], settings)
        rounds = alternate(mix, settings, ways)
    return result(_name(settings), rounds, baseline=baseline, must=must) | {"keys": load.keys}


def _name(settings: Settings) -> str:
    keys = settings.keys or KEYS
    return f"drain --target {settings.target}" + ("" if keys == KEYS else f" --keys {keys}")


def _delta_ways(made: Rig) -> dict[str, Way]:
    def baseline(part: Part) -> Taken:
        return recvlogical.drain(made.of(part), made.directory / "baseline.out")

    def ours(part: Part) -> Taken:
        scratch = made.scratch("run")
        lake = scratch / "lake"
        keys = {"kind": "delta", "path": str(lake), "batch": BATCH}
        return deliver(scratch, made.of(part), {TARGET: keys}, partial(content.lake_equals, lake))

    return {BASELINE: baseline, OURS: ours}


def _postgres_ways(made: Rig, other: EmbeddedPostgres) -> dict[str, Way]:
    def baseline(part: Part) -> Taken:
        return subscription.drain(made.of(part), other)

    def ours(part: Part) -> Taken:
        with fresh_database(other, "mirror") as (copy, uri):

            def equal(source: Connection) -> bool:
                return content.copies_equal(source, copy)

            keys = {"kind": "postgres", "uri": uri, "batch": BATCH}
            settled = partial(subscription.settle, copy)
            used = partial(server_cpu, other)
            return deliver(made.scratch("run"), made.of(part), {TARGET: keys}, equal, settled, used)

    return {BASELINE: baseline, OURS: ours}
