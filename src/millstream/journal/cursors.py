"""Whether a cursor and a journal belong together."""

from __future__ import annotations

from millstream.errors import JournalMismatch
from millstream.journal.reader import JournalReader
from millstream.journal.writer import JournalWriter
from millstream.model import Cursor

_REMEDY = "the journal was replaced or restored from an older copy: put the right journal back, or re-base the stream"


def check_cursor(journal: JournalReader | JournalWriter, cursor: Cursor) -> None:
    """Raise JournalMismatch unless going on from `cursor` in this journal is exact.

    The ids must be equal, the cursor's seq must be visible, and the transaction that ends there
    must be the one the cursor was saved after. A seq that is no longer retained is for `plan_end`
    to refuse.
    """
    reader = journal if isinstance(journal, JournalReader) else JournalReader([str(journal.path)])
    header, head = reader.header(), reader.head()
    mine = f"the cursor of {cursor.stream}/{cursor.target}"
    if cursor.journal_id != header.journal_id:
        raise JournalMismatch(f"{mine} names journal {cursor.journal_id}, this is {header.journal_id}", hint=_REMEDY)
    end = head.seq if head else header.first_seq - 1
    if cursor.seq > end:
        raise JournalMismatch(f"{mine} is at seq {cursor.seq}, the journal ends at {end}", hint=_REMEDY)
    if cursor.seq < header.first_seq:
        # A re-based journal begins where its slowest target was: the others are ahead of its start.
        if header.incarnation == 1 and cursor.position > header.start_position:
            raise JournalMismatch(
                f"{mine} is before the first row but at position {cursor.position}, "
                f"the journal starts at {header.start_position}",
                hint=_REMEDY,
            )
        return
    if cursor.seq < reader.first_seq() - 1:
        return
    cut = reader.cut_at(cursor.seq)
    if cut is None or cut.resume_position != cursor.position:
        there = f"position {cut.resume_position}" if cut else "the middle of a transaction"
        raise JournalMismatch(
            f"{mine} is at seq {cursor.seq}, position {cursor.position}; the journal has {there} there", hint=_REMEDY
        )
