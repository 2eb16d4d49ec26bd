"""All benches, several times, each time as a process of its own; and a table of what came of it, with the spread.

`python -m millstream.bench.runs FILE --runs 3` appends one line of JSON per bench and run to FILE, and ends with the
table of all lines that are in it, as Markdown. `--table` only makes the table. Before each bench it waits until the
machine is quiet.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from millstream.bench import ALL
from millstream.bench.frame import MOST_LOAD, load_now
from millstream.model import Json

PATIENCE = 900.0
"""Seconds that the machine may take to become quiet before a bench is given up."""
HEADINGS = ("bench", "runs", "ours", "baseline", "ratio", "must reach", "reached", "content")


def main(arguments: Sequence[str]) -> int:
    """0 if every bench gave a figure, and its content was right."""
    parser = argparse.ArgumentParser(prog="python -m millstream.bench.runs", description="All benches, several times.")
    parser.add_argument("file", type=Path, help="where the lines of JSON are kept; what is there already counts too")
    parser.add_argument("--runs", type=int, default=3, help="how often each bench is run")
    parser.add_argument("--only", action="append", default=[], help="only benches of this name; may be given again")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine; the results say so")
    parser.add_argument("--table", action="store_true", help="only make the table of what is in the file")
    chosen = parser.parse_args(arguments)
    missed = 0 if chosen.table else _run_all(chosen.file, chosen.runs, chosen.only, force=chosen.force)
    results = [json.loads(line) for line in chosen.file.read_text().splitlines()]
    print(markdown(results))
    return 1 if missed or not all(one["equal"] for one in _with_rivals(results)) else 0


def _run_all(file: Path, runs: int, only: Sequence[str], *, force: bool) -> int:
    """Returns how many gave no figure."""
    missed = 0
    for number in range(runs):
        for name, options in ALL:
            if only and name not in only:
                continue
            asked = [name, *flags(options)]
            command = ["bench", *asked, "--json", *(["--force"] if force else [])]
            _say(f"{number + 1} of {runs}: {' '.join(asked)}")
            if not force:
                _await_quiet()
            done = subprocess.run(
                [sys.executable, "-m", "millstream", *command], stdout=subprocess.PIPE, text=True, check=False
            )
            try:
                found = json.loads(done.stdout)
            except ValueError:
                _say(f"no figure came of it (exit code {done.returncode})")
                missed += 1
                continue
            with file.open("a") as lines:
                lines.write(json.dumps(found) + "\n")
    return missed


def flags(options: Mapping[str, Any]) -> list[str]:
    """A bench's options as the command has them."""
    found: list[str] = []
    for option, value in options.items():
        found += [f"--{option.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return found


def _await_quiet() -> None:
    deadline = time.monotonic() + PATIENCE
    while load_now() > MOST_LOAD and time.monotonic() < deadline:
        time.sleep(1)


def markdown(results: Sequence[Json]) -> str:
    """A row per bench: medians, and in brackets the lowest and the highest of its runs."""
    rows = [HEADINGS, tuple("---" for _ in HEADINGS)]
    everything = list(_with_rivals(results))
    for name in dict.fromkeys(one["name"] for one in everything):
        rows.append(_row(name, [one for one in everything if one["name"] == name]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _with_rivals(results: Sequence[Json]) -> Iterator[Json]:
    for one in results:
        yield one
        for rival in one.get("rivals", ()):
            yield rival | {"name": f"{one['name']} beside {rival['baseline'].split(',')[0]}", "forced": one["forced"]}


def _row(name: str, runs: Sequence[Json]) -> tuple[str, ...]:
    last = runs[-1]
    unit = last["unit"].removesuffix(" p50").removesuffix(" p99")
    ours = _spread([one["value"] for one in runs]) + f" {last['unit']}"
    if "p99" in last:
        ours += f"; {_spread([one['p99'] for one in runs])} {unit} p99"
    must = last["must"]
    return (
        f"`{name}`" if " beside " not in name else name,
        str(len(runs)) + (" (forced)" if any(one["forced"] for one in runs) else ""),
        ours,
        f"{_spread([one['baseline_value'] for one in runs])} {last['unit']}",
        _spread([one["ratio"] for one in runs]),
        "" if must is None else str(must),
        f"{sum(bool(one['reached']) for one in runs)} of {len(runs)}",
        "equal" if all(one["equal"] for one in runs) else "NOT EQUAL",
    )


def _spread(values: Sequence[float]) -> str:
    middle = _number(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({_number(min(values))} to {_number(max(values))})"


def _number(value: float) -> str:
    return f"{round(value):,}" if abs(value) >= 1000 else f"{value:.3g}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
