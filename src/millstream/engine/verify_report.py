"""What came of a comparison of targets with their source. No value of a row is in it, only keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from millstream.model import Json


@dataclass(frozen=True)
class TableVerdict:
    """One table. Of one without a key `missing` and `extra` count rows, and nothing can be `changed`."""

    table: str
    source_rows: int
    target_rows: int
    missing: int = 0
    """Keys that the target does not have,"""
    changed: int = 0
    """keys whose rows are others there,"""
    extra: int = 0
    """and keys that the source does not have: as they were found, before any repair."""
    keys: tuple[str, ...] = ()
    """The first of these keys, as JSON."""
    repaired: bool = False
    """They were written once more, and the table was equal when it was compared again."""
    keyed: bool = True
    """Whether its rows are told by a key. Without one there is nothing to show or to repair them by."""

    @property
    def differences(self) -> int:
        return self.missing + self.changed + self.extra

    @property
    def equal(self) -> bool:
        """Whether the table is equal now."""
        return not self.differences or self.repaired


@dataclass(frozen=True)
class TargetVerdict:
    """One target, at one exact position of its source."""

    target: str
    kind: str
    seq: int
    position: str
    tables: tuple[TableVerdict, ...]
    compared_at: datetime
    seconds: float
    uncaptured: tuple[str, ...] = ()
    """Tables that the stream's patterns name and that were left out, because nothing captures them yet."""

    @property
    def equal(self) -> bool:
        return all(table.equal for table in self.tables)

    @property
    def rows(self) -> int:
        return sum(table.source_rows for table in self.tables)

    def to_json(self) -> Json:
        value = asdict(self)
        value["compared_at"] = self.compared_at.isoformat()
        value["equal"] = self.equal
        value["uncaptured"] = list(self.uncaptured)
        value["tables"] = [{**asdict(table), "keys": list(table.keys), "equal": table.equal} for table in self.tables]
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TargetVerdict:
        def table(one: Mapping[str, Any]) -> TableVerdict:
            own = {name: held for name, held in one.items() if name != "equal"}
            return TableVerdict(**{**own, "keys": tuple(one["keys"])})

        own = {name: held for name, held in value.items() if name != "equal"}
        at = datetime.fromisoformat(value["compared_at"])
        lists = {"tables": tuple(map(table, value["tables"])), "uncaptured": tuple(value["uncaptured"])}
        return cls(**{**own, **lists, "compared_at": at})


@dataclass(frozen=True)
class VerifyReport:
    """All targets of a stream that were asked for."""

    stream: str
    targets: tuple[TargetVerdict, ...]
    failures: Mapping[str, str] = field(default_factory=dict)
    """Targets of which nothing can be said, and why."""

    @property
    def equal(self) -> bool:
        """Whether all of them are known to be."""
        return not self.failures and all(target.equal for target in self.targets)

    def to_json(self) -> Json:
        return {
            "stream": self.stream,
            "equal": self.equal,
            "targets": [target.to_json() for target in self.targets],
            "failures": dict(self.failures),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> VerifyReport:
        return cls(value["stream"], tuple(map(TargetVerdict.from_json, value["targets"])), dict(value["failures"]))
