"""`millstream bench`: measure Millstream on this machine, against another way of doing the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.output import Json, console, print_json

if TYPE_CHECKING:
    from millstream.model import Json as Result


def _count(text: str) -> int:
    """A number, with `k` for thousands or `M` for millions."""
    factor = {"k": 1_000, "M": 1_000_000}.get(text[-1:])
    number = text[:-1] if factor else text
    if not number.isdigit():
        raise typer.BadParameter(f"{text!r} is no number: 5000, 100k, 1M")
    return int(number) * (factor or 1)


def bench(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Which one; without a name, all of them.")] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, max=10_000_000, metavar="N", help="How many changes, or rows.")
    ] = None,
    repeat: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="How often each way is run; medians count.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.5, metavar="SECONDS", help="How long a bench that waits does so.")
    ] = None,
    bulk: Annotated[bool, typer.Option("--bulk", help="`capture` by bulk reading instead of streaming.")] = False,
    open_transaction: Annotated[
        bool, typer.Option("--open-transaction", help="`capture` while a transaction is open all the time.")
    ] = False,
    target: Annotated[
        str | None, typer.Option(metavar="KIND", help="What `drain`, `latency`, `snapshot` and `tables` deliver to.")
    ] = None,
    keys: Annotated[
        int | None, typer.Option(parser=_count, metavar="N", help="How many keys a mirror has: `100k`, `1M`.")
    ] = None,
    no_debezium: Annotated[bool, typer.Option("--no-debezium", help="Leave Debezium out of `drain`.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Measure on a busy machine; the result says so.")] = False,
    json: Json = False,
) -> None:
    """Measure, and check what was measured. Ends with 1 if the content was not equal."""
    from millstream.bench import BENCHES

    if name is not None and name not in BENCHES:
        raise typer.BadParameter(f"no bench is called {name}; there are {', '.join(BENCHES)}", param_hint="NAME")
    given = {
        "rows": rows,
        "repeat": repeat,
        "seconds": seconds,
        "bulk": bulk or None,
        "open_transaction": open_transaction or None,
        "debezium": False if no_debezium else None,
        "target": target,
        "keys": keys,
    }
    chosen = {option: value for option, value in given.items() if value is not None}
    _refuse_strangers(name, chosen)
    results = _run(name, chosen, force=force, live=not json)
    _print(results, alone=name is not None, json=json)
    everything = [one for result in results for one in (result, *result.get("rivals", ()))]
    raise typer.Exit(0 if all(one["equal"] for one in everything) else 1)


def _refuse_strangers(name: str | None, chosen: Mapping[str, object]) -> None:
    """An option that a bench does not know would be ignored; so it is refused."""
    from millstream.bench import BENCHES

    for option in chosen:
        knowing = [one for one, bench in BENCHES.items() if option in bench.options]
        flag = {"debezium": "no-debezium"}.get(option, option.replace("_", "-"))
        if name is None and option in ("bulk", "open_transaction", "target", "keys"):
            raise typer.BadParameter(f"--{flag} needs the name of a bench: {', '.join(knowing)}")
        if name is not None and name not in knowing:
            raise typer.BadParameter(f"--{flag} means nothing to {name}, only to {', '.join(knowing)}")
    if name is not None and "target" in chosen and chosen["target"] not in BENCHES[name].targets:
        known = ", ".join(BENCHES[name].targets)
        raise typer.BadParameter(f"{name} knows no target {chosen['target']}, only {known}", param_hint="--target")


def _run(name: str | None, chosen: Mapping[str, Any], *, force: bool, live: bool) -> list[Result]:
    """The results of one bench, or of all. What a bench does not know of the options is not for it."""
    from millstream.bench import ALL, BENCHES
    from millstream.bench.frame import Settings, machine
    from millstream.cli.bench_display import display

    results: list[Result] = []
    with machine(name or "all", force=force) as load, display(live=live) as steps:
        for one, own in ALL if name is None else [(name, {})]:
            known = {option: value for option, value in {**chosen, **own}.items() if option in BENCHES[one].options}
            found = BENCHES[one].run(Settings(steps, **known))
            results.append({**found, "load": round(load, 2), "forced": force})
    return results


def _print(results: list[Result], *, alone: bool, json: bool) -> None:
    from millstream.cli.bench_display import notes, table

    if json:
        print_json(results[0] if alone else results)
        return
    out = console()
    out.print(table(results))
    for note in notes(results):
        out.print(note)
