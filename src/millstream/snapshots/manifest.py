"""What is known of one snapshot: the file that is written last, so that what has one is whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from millstream.errors import SnapshotError
from millstream.model import Json
from millstream.snapshots.rows import Format
from millstream.snapshots.urls import below

VERSION = 1
NAME = "manifest.json"


@dataclass(frozen=True)
class KeptFile:
    """A file of a snapshot, and what it must be."""

    file: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class TableEntry:
    """A table of a snapshot."""

    name: str
    place: str
    data: KeptFile
    schema: str
    """Arrow's, serialized, in base64."""
    columns: Mapping[str, str]
    """The same to be read: name to type."""
    make: tuple[str, ...]
    finish: tuple[str, ...]


@dataclass(frozen=True)
class TargetSnapshot:
    """The state of one target of a stream at one moment, and where it is kept.

    Its tables have every change up to `seq`, at `position` of the source, and none after.
    """

    id: str
    """When it was taken, in UTC; of two, the later one is greater."""
    stream: str
    target: str
    kind: str
    base: str
    """The path or URL under which it is kept; another process can open it by this."""
    created_at: datetime
    """Before its state was fixed: what happened at the target later than this may not be in it."""
    seconds: float
    journal_id: str
    epoch: int
    seq: int
    position: int
    position_text: str
    """The position as the source's people write it."""
    format: Format
    settings: Json = field(repr=False)
    """What of the stream decides which rows the target has: a snapshot is only of use to a stream with the same."""
    own: Json = field(repr=False)
    tables: tuple[TableEntry, ...] = field(repr=False)
    letters: KeptFile | None = None
    """The target's dead letters up to there."""

    @property
    def rows(self) -> int:
        return sum(table.data.rows for table in self.tables)

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(file.bytes for file in self.files)

    @property
    def files(self) -> list[KeptFile]:
        return [*(table.data for table in self.tables), *([self.letters] if self.letters else [])]

    @property
    def folder(self) -> str:
        """Where its files are, below the base."""
        return f"{self.stream}/{self.target}/{self.id}"

    def to_json(self) -> Json:
        """For people and programs; without what only a restore needs."""
        return {
            "id": self.id,
            "stream": self.stream,
            "target": self.target,
            "kind": self.kind,
            "base": self.base,
            "path": below(self.base, self.folder),
            "created_at": self.created_at.isoformat(),
            "seconds": self.seconds,
            "journal_id": self.journal_id,
            "seq": self.seq,
            "position": self.position_text,
            "format": self.format.value,
            "rows": self.rows,
            "bytes": self.size,
            "tables": [
                {"name": one.name, "rows": one.data.rows, "bytes": one.data.bytes, "columns": dict(one.columns)}
                for one in self.tables
            ],
            "dead_letters": self.letters.rows if self.letters else 0,
        }

    def to_bytes(self) -> bytes:
        value = {**asdict(self), "created_at": self.created_at.isoformat(), "version": VERSION}
        del value["base"]
        return json.dumps(value, indent=1, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes, base: str, folder: str) -> TargetSnapshot:
        """Raises SnapshotError for what is no manifest of a version that is known here."""
        try:
            value: dict[str, Any] = json.loads(data)
            version = value.pop("version")
            if version != VERSION:
                raise SnapshotError(
                    f"the snapshot in {below(base, folder)} was written by another version of millstream ({version})",
                    hint="use that version, or a newer one",
                )
            tables = tuple(_table(one) for one in value.pop("tables"))
            letters = value.pop("letters")
            created = datetime.fromisoformat(value.pop("created_at"))
            format = Format(value.pop("format"))
            kept = KeptFile(**letters) if letters else None
            return cls(**value, base=base, created_at=created, format=format, tables=tables, letters=kept)
        except (ValueError, KeyError, TypeError) as damaged:
            raise SnapshotError(
                f"the manifest in {below(base, folder)} is damaged: {type(damaged).__name__}",
                hint="remove that directory, and use another snapshot",
            ) from None


def _table(value: dict[str, Any]) -> TableEntry:
    data = KeptFile(**value.pop("data"))
    make, finish = tuple(value.pop("make")), tuple(value.pop("finish"))
    return TableEntry(**value, data=data, make=make, finish=finish)
