"""Checking rows in seq order, over segments: dense seqs, whole transactions, known relations, true cuts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from millstream.journal.index import Records, column, row_bytes, transaction_ends


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and the file it is wrong in."""

    file: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}: {self.message}"


class RowChecker:
    """Sees all rows of a journal once, segment by segment."""

    def __init__(self, first_seq: int, relations: int, say: Callable[[str, str], None]) -> None:
        self.next_seq = first_seq
        self._relations = relations
        self._say = say
        self._before: tuple[int, int] | None = None
        """Commit position and index of the last row; None at the start, and after a gap."""
        self._gap = False

    def skip_to(self, seq: int) -> None:
        """The rows before `seq` cannot be looked at; that was said already."""
        self.next_seq = seq
        self._before = None
        self._gap = True

    def segment(
        self, name: str, rows: pa.RecordBatch, first: int, last: int, cuts: Records | None, last_cut: int | None
    ) -> None:
        """Check the rows of a segment, in seq order, against what is said of it."""
        if len(rows) == 0:
            if last >= first:
                self._say(name, f"has no rows, but should hold seq {first} to {last}")
            return
        seq = column(rows, "seq")
        if seq[0] != self.next_seq:
            what = "a gap" if seq[0] > self.next_seq else "rows twice"
            self._say(name, f"starts at seq {seq[0]} where {self.next_seq} should be: {what}")
        steps = np.diff(seq)
        if (steps != 1).any():
            at = int(np.flatnonzero(steps != 1)[0])
            what = "is there twice" if steps[at] == 0 else f"is followed by seq {seq[at + 1]}"
            self._say(name, f"seq {seq[at]} {what}")
        if (seq[0], seq[-1]) != (first, last):
            self._say(name, f"holds seq {seq[0]} to {seq[-1]}, not {first} to {last}")
        self._transactions(name, rows)
        relation = column(rows, "relation")
        if relation.min() < 0 or relation.max() > self._relations:
            self._say(name, f"names relation {relation.max()}, but only {self._relations} are described")
        if cuts is not None:
            self._check_cuts(name, rows, cuts, last_cut)
        self.next_seq = int(seq[-1]) + 1
        self._before = (int(column(rows, "commit_position")[-1]), int(column(rows, "tx_index")[-1]))

    def _transactions(self, name: str, rows: pa.RecordBatch) -> None:
        seq, index = column(rows, "seq"), column(rows, "tx_index")
        commit, resume = column(rows, "commit_position"), column(rows, "resume_position")
        same = np.diff(commit) == 0
        wrong = np.flatnonzero(np.where(same, np.diff(index) != 1, index[1:] != 0))
        if len(wrong):
            self._say(name, f"the transaction of seq {seq[wrong[0] + 1]} is not whole: its changes are not numbered on")
        wrong = np.flatnonzero((np.diff(commit) < 0) | (np.diff(resume) < 0) | (same & (np.diff(resume) != 0)))
        if len(wrong):
            self._say(name, f"the positions go back, or change inside a transaction, at seq {seq[wrong[0] + 1]}")
        if self._before is None:
            starts_well = self._gap or index[0] == 0
        elif commit[0] == self._before[0]:
            starts_well = index[0] == self._before[1] + 1
        else:
            starts_well = commit[0] > self._before[0] and index[0] == 0
        if not starts_well:
            self._say(name, f"seq {seq[0]} does not go on where the row before it ended")

    def _check_cuts(self, name: str, rows: pa.RecordBatch, cuts: Records, last_cut: int | None) -> None:
        """Every cut must be an end with its own row's facts, and the last end must be there."""
        file = name.replace(".arrows", ".cuts")
        seq, commit = column(rows, "seq"), column(rows, "commit_position")
        ends = transaction_ends(commit, open_end=last_cut != seq[-1])
        at = np.searchsorted(seq, cuts["seq"])
        if len(cuts) and (at.max() >= len(seq) or not np.isin(at, ends).all() or (np.diff(at) <= 0).any()):
            self._say(file, "names ends of transactions that are none")
            return
        total = np.cumsum(row_bytes(rows))
        ts = column(rows, "commit_ts")
        facts = {
            "seq": seq[at],
            "commit_position": commit[at],
            "resume_position": column(rows, "resume_position")[at],
            "commit_ts_us": ts[at],
            "bytes": total[at],
        }
        if len(cuts):
            starts = np.concatenate(([0], at[:-1] + 1))
            facts["max_ts_us"] = np.maximum.reduceat(ts[: at[-1] + 1], starts)
            facts["min_ts_us"] = np.minimum.reduceat(ts[: at[-1] + 1], starts)
        if any((cuts[field] != value).any() for field, value in facts.items()):
            self._say(file, "does not agree with the segment")
        last = int(seq[ends[-1]]) if len(ends) else None
        if last != last_cut or (len(cuts) and int(cuts["seq"][-1]) != last_cut):
            self._say(file, f"ends at seq {last_cut}, the last transaction of the segment at {last}")
