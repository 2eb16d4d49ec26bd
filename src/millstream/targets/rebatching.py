"""Batches of a directory that come once more, in the place of what they brought first.

The files of a batch count by its commit. Those that come anew get other names, and count when the commit, which then
lists them instead of the old ones, is renamed into the place of the one before: at each moment a reader that goes by
commits finds every change once. Only then the old files go.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from millstream.errors import TargetRefused
from millstream.model import Json, SeqRange
from millstream.targets.directory import OwnDirectory, read_json, write_whole


def batches_within(directory: OwnDirectory, span: SeqRange) -> list[SeqRange]:
    """The batches in which changes of the span are, oldest first. Baselines and copies of tables are none."""
    found = []
    for name in _commits(directory):
        end = name.removesuffix(".json")
        if not end.isdigit() or int(end) <= span.start:
            continue
        commit = read_json(directory.own / "commits" / name)
        if commit["start"] >= span.end:
            break
        if commit["start"] < commit["end"]:
            found.append(SeqRange(commit["start"], commit["end"]))
    return found


def replace_files(
    directory: OwnDirectory, range: SeqRange, epoch: int, files: Sequence[Json], only: frozenset[int] | None
) -> list[Path]:
    """Let the batch count with these files instead of those of the relations `only` (None: of all).

    Returns the files that count no more. Idempotent.
    """
    path = directory.own / "commits" / f"{range.end:020d}.json"
    commit = read_json(path) if path.exists() else {}
    if commit.get("start") != range.start:
        raise TargetRefused(
            f"{directory.root} has no batch from seq {range.start} to {range.end} any more",
            hint="its commits were changed by somebody else; restore the directory from a copy",
        )
    kept = [file for file in commit["files"] if only is not None and file["relation"] not in only]
    now = sorted([*kept, *files], key=lambda file: (file["table"], file["first_seq"]))
    write_whole(path, {**commit, "files": now, "replayed": epoch})
    counts = {file["path"] for file in now}
    return [directory.root / file["path"] for file in commit["files"] if file["path"] not in counts]


def listed_files(directory: OwnDirectory) -> set[Path]:
    """Every file that counts."""
    commits = directory.own / "commits"
    return {
        directory.root / file["path"] for name in _commits(directory) for file in read_json(commits / name)["files"]
    }


def _commits(directory: OwnDirectory) -> Iterator[str]:
    names = (entry.name for entry in os.scandir(directory.own / "commits"))
    return iter(sorted(name for name in names if name.endswith(".json")))
