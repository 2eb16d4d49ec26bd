"""Dead letters of a target in a snapshot: what it could not take up to there, it lacks after a restore as well."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime

from millstream.errors import SnapshotError
from millstream.snapshots.files import Files
from millstream.snapshots.manifest import KeptFile
from millstream.state.base import Letter, LetterState

FILE = "letters.jsonl"


def write_letters(files: Files, folder: str, letters: Sequence[Letter]) -> KeptFile:
    """Write letters, with everything, a line each."""
    with files.writing(f"{folder}/{FILE}") as file:
        for letter in letters:
            value = {**asdict(letter), "at": letter.at.isoformat(), "state": letter.state.value}
            value["payload"] = base64.b64encode(letter.payload).decode()
            file.write(json.dumps(value).encode() + b"\n")
    return KeptFile(FILE, len(letters), file.bytes, file.sha256)


def read_letters(data: bytes) -> list[Letter]:
    """The letters back. Raises SnapshotError for what are none."""
    try:
        return [_letter(json.loads(line)) for line in data.splitlines()]
    except (ValueError, KeyError, TypeError) as damaged:
        raise SnapshotError(f"the letters of a snapshot are damaged: {type(damaged).__name__}") from None


def _letter(value: dict[str, object]) -> Letter:
    at, payload = datetime.fromisoformat(str(value["at"])), base64.b64decode(str(value["payload"]))
    known = {**value, "at": at, "payload": payload, "state": LetterState(str(value["state"])), "id": 0}
    return Letter(**known)  # type: ignore[arg-type]  # a wrong field is told as damage
