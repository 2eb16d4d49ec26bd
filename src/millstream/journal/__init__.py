"""The journal: the ordered, durable log between capture and delivery. `format.py` draws it."""

from millstream.journal.cursors import check_cursor
from millstream.journal.describe import JournalSummary, SegmentSummary, describe, rows
from millstream.journal.format import JOURNAL, Head, Header, Slice
from millstream.journal.head import journal_exists
from millstream.journal.index import Cut
from millstream.journal.looks import CatalogChange
from millstream.journal.places import Earliest
from millstream.journal.pruned import Pruned
from millstream.journal.reader import JournalReader, Planned, Retained
from millstream.journal.rowcheck import Problem
from millstream.journal.schemas import InForce
from millstream.journal.slices import open_slice
from millstream.journal.verify import verify
from millstream.journal.writer import JournalWriter

__all__ = [
    "JOURNAL",
    "CatalogChange",
    "Cut",
    "Earliest",
    "Head",
    "Header",
    "InForce",
    "JournalReader",
    "JournalSummary",
    "JournalWriter",
    "Planned",
    "Problem",
    "Pruned",
    "Retained",
    "SegmentSummary",
    "Slice",
    "check_cursor",
    "describe",
    "journal_exists",
    "open_slice",
    "rows",
    "verify",
]
