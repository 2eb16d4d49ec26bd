"""Dead letters of a target in a snapshot: what it could not take up to there, it lacks after a restore as well.

What was in doubt of its rows is in the same file: after a restore it is so again.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from millstream.errors import SnapshotError
from millstream.snapshots.files import Files
from millstream.snapshots.manifest import KeptFile
from millstream.state.base import Doubt, Letter, LetterState

FILE = "letters.jsonl"


@dataclass(frozen=True)
class Open:
    """What is open of a target: its letters, with everything, and what is in doubt."""

    letters: Sequence[Letter] = ()
    doubts: Sequence[Doubt] = ()

    def up_to(self, seq: int, before: Open) -> Open:
        """What is open now or was open before of changes up to there."""
        letters = {one.event_id: one for one in (*before.letters, *self.letters) if one.seq <= seq}
        doubts = {one.event_id: one for one in (*before.doubts, *self.doubts) if one.seq <= seq}
        return Open(list(letters.values()), list(doubts.values()))

    def __bool__(self) -> bool:
        return bool(self.letters or self.doubts)


def write_letters(files: Files, folder: str, found: Open) -> KeptFile:
    """Write what is open, a line each. The file's rows are letters."""
    with files.writing(f"{folder}/{FILE}") as file:
        for letter in found.letters:
            value = {**asdict(letter), "at": letter.at.isoformat(), "state": letter.state.value}
            value["payload"] = base64.b64encode(letter.payload).decode()
            file.write(json.dumps(value).encode() + b"\n")
        for doubt in found.doubts:
            file.write(json.dumps({"doubt": asdict(doubt)}).encode() + b"\n")
    return KeptFile(FILE, len(found.letters), file.bytes, file.sha256)


def read_letters(data: bytes) -> Open:
    """The same back. Raises SnapshotError for what are none."""
    try:
        lines = [json.loads(line) for line in data.splitlines()]
        doubts = [Doubt(**line["doubt"]) for line in lines if "doubt" in line]
        return Open([_letter(line) for line in lines if "doubt" not in line], doubts)
    except (ValueError, KeyError, TypeError) as damaged:
        raise SnapshotError(f"the letters of a snapshot are damaged: {type(damaged).__name__}") from None


def _letter(value: dict[str, object]) -> Letter:
    at, payload = datetime.fromisoformat(str(value["at"])), base64.b64decode(str(value["payload"]))
    known = {**value, "at": at, "payload": payload, "state": LetterState(str(value["state"])), "id": 0}
    return Letter(**known)  # type: ignore[arg-type]  # a wrong field is told as damage
