"""The journal: the ordered, durable log between capture and delivery. `format.py` draws it."""

from millstream.journal.cursors import check_cursor
from millstream.journal.format import JOURNAL, Head, Header, Slice
from millstream.journal.index import Cut
from millstream.journal.reader import JournalReader, Planned
from millstream.journal.slices import open_slice
from millstream.journal.writer import JournalWriter, journal_exists

__all__ = [
    "JOURNAL",
    "Cut",
    "Head",
    "Header",
    "JournalReader",
    "JournalWriter",
    "Planned",
    "Slice",
    "check_cursor",
    "journal_exists",
    "open_slice",
]
