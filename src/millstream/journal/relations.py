"""The relation descriptions of a journal: one line each, once per content, never changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

from millstream.errors import JournalCorrupt, JournalFull
from millstream.failpoint import failpoint
from millstream.journal.files import disk_errors, open_file, sync_directory, sync_file, write_all
from millstream.model import Relation

FILE = "relations.jsonl"


def parse_line(line: bytes, number: int) -> Relation | None:
    """The description on a line; None unless it is whole, untouched and in its place."""
    try:
        value = json.loads(line)
        relation = Relation.from_json(value["relation"])
    except (ValueError, KeyError, TypeError):
        return None
    return relation if value.get("id") == number and value.get("fingerprint") == relation.fingerprint() else None


def parse(raw: bytes, path: object) -> dict[int, Relation]:
    """All descriptions in `raw`, which must be whole lines."""
    found: dict[int, Relation] = {}
    for number, line in enumerate(raw.splitlines(), start=1):
        relation = parse_line(line, number)
        if relation is None:
            raise JournalCorrupt(f"{path}: line {number} is not the description that was written")
        found[number] = relation
    return found


class RelationLog:
    """The writer's side. Ids are given at once and become durable with the next `sync`."""

    def __init__(self, directory: Path, least_bytes: int) -> None:
        """Open, and cut off a line that was never finished. `least_bytes` were promised to readers."""
        self._path = directory / FILE
        with disk_errors(self._path, "open the relations"):
            new = not self._path.exists()
            self._fd = open_file(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            raw = self._path.read_bytes()
            if new:
                sync_directory(directory)
        try:
            self._take_in(raw, least_bytes)
        except BaseException:
            self.close()
            raise

    def _take_in(self, raw: bytes, least_bytes: int) -> None:
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < least_bytes:
            raise JournalCorrupt(f"{self._path} has {len(whole)} bytes of the {least_bytes} that were committed")
        known = parse(whole, self._path)
        self._ids = {relation.fingerprint(): number for number, relation in known.items()}
        self.described = list(known.values())
        """Every description, in the order of their ids."""
        self._given: dict[Relation, int] = {}
        """What was asked for before: a source may describe a table anew for every stretch of its log."""
        self.bytes = len(whole)
        self._waiting: list[bytes] = []
        if len(whole) < len(raw):
            self._truncate()

    @property
    def count(self) -> int:
        return len(self._ids)

    def register(self, relation: Relation) -> int:
        given = self._given.get(relation)
        if given is None:
            given = self._given[relation] = self._register(relation)
        return given

    def _register(self, relation: Relation) -> int:
        fingerprint = relation.fingerprint()
        if fingerprint not in self._ids:
            number = len(self._ids) + 1
            value = {"id": number, "fingerprint": fingerprint, "relation": relation.to_json()}
            self._waiting.append(json.dumps(value, separators=(",", ":")).encode() + b"\n")
            self._ids[fingerprint] = number
            self.described.append(relation)
        return self._ids[fingerprint]

    def sync(self) -> None:
        """Make every id that was given durable. After JournalFull the ids stay good and wait on."""
        if not self._waiting:
            return
        try:
            with disk_errors(self._path, "write a relation"):
                write_all(self._fd, self._waiting)
        except JournalFull:
            self._truncate()
            raise
        sync_file(self._fd, self._path)
        self.bytes += sum(map(len, self._waiting))
        self._waiting.clear()
        failpoint("journal.relation_written")

    def _truncate(self) -> None:
        os.ftruncate(self._fd, self.bytes)
        sync_file(self._fd, self._path)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
