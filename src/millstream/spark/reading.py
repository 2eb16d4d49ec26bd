"""What a DataFrame of changes reads: which journal, from where to where, which table in which columns.

Everything here happens on the driver's host, from the journal's small files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from millstream import changelog
from millstream.errors import ConfigError, JournalMismatch, MillstreamError, OutOfRange
from millstream.journal import Head, Header, JournalReader
from millstream.journal.format import Slice
from millstream.journal.index import column
from millstream.journal.slices import read_slice
from millstream.model import Relation, SeqRange
from millstream.sources.decoders import messages
from millstream.sources.positions import parse_position
from millstream.spark.format_options import FormatOptions, Json
from millstream.spark.rows import MESSAGES
from millstream.spark.variants import with_variants
from millstream.wire.envelope import ENVELOPE

WINDOW = 1 << 16
"""How many seqs are looked through at once for a table's last change; four times as many each time."""


@dataclass(frozen=True)
class Reading:
    """Settled when the DataFrame is made, so that one DataFrame always means the same changes. Picklable."""

    options: FormatOptions
    header: Header
    head: int
    """The visible end at that moment: where a batch without `endingSeq` ends."""
    start: int | MillstreamError
    """The cursor before the first change, or why there is none. Only who begins there must know: a
    streaming query that goes on from its checkpoint does not, though its start may be pruned by now."""
    derived: bool = False
    """The columns are those of the table, and not the user's choice."""

    @property
    def locations(self) -> tuple[str, ...]:
        return (self.options.journal,)

    def journal(self) -> JournalReader:
        """The journal, which must be the one that was there when the DataFrame was made."""
        found = JournalReader(self.locations)
        journal_id = found.header().journal_id
        if journal_id != self.header.journal_id:
            raise JournalMismatch(
                f"{self.options.journal} holds journal {journal_id} now, not {self.header.journal_id}",
                hint="load the DataFrame again",
            )
        return found

    def begin(self) -> int:
        """The cursor before the first change. Raises when there is no such place in the journal."""
        if isinstance(self.start, MillstreamError):
            raise self.start
        ending = self.options.ending_seq
        if ending is not None and ending <= self.start:
            raise ConfigError(f"endingSeq {ending} is before the start, which is seq {self.start + 1}")
        return self.start

    def batch(self) -> SeqRange:
        """The whole range of a batch read."""
        begin, ending = self.begin(), self.options.ending_seq
        if ending is not None and ending > self.head:
            raise OutOfRange(
                f"endingSeq {ending} is beyond the journal's end, seq {self.head}",
                hint="leave it out to read up to the end, or wait until it is there",
            )
        return SeqRange(begin, self.head if ending is None else ending)

    def versions(self, journal: JournalReader) -> dict[int, Relation]:
        """The descriptions of the table that the journal has now, by id; of all tables without `table`."""
        known = {MESSAGES: messages(self.header.source_kind), **journal.relations()}
        table = self.options.table
        return {id: relation for id, relation in known.items() if table is None or relation.table == table}


def settle(options: FormatOptions) -> Reading:
    """Look into the journal. Raises JournalError when there is none."""
    journal = JournalReader([options.journal])
    header, head = journal.header(), journal.head()
    seq = header.first_seq - 1 if head is None else head.seq
    start: int | MillstreamError
    try:
        start = header.first_seq - 1 if head is None else _start(options, journal, header, head)
    except (OutOfRange, ConfigError) as refused:
        start = refused
    return Reading(options, header, seq, start)


def _start(options: FormatOptions, journal: JournalReader, header: Header, head: Head) -> int:
    if options.starting_position is not None:
        return journal.seq_at_position(_position(options.starting_position, header))
    if options.starting_timestamp_us is not None:
        return journal.seq_at_time(options.starting_timestamp_us)
    first = journal.first_seq()
    if options.starting_seq is None:
        return first - 1
    if options.starting_seq < first:
        raise journal.retained().earliest.refuse(f"startingSeq {options.starting_seq}", header.source_kind)
    if options.starting_seq > head.seq + 1:
        raise OutOfRange(
            f"startingSeq {options.starting_seq} is beyond the journal's end, seq {head.seq}",
            hint=f"{head.seq + 1} starts with the next change",
        )
    return options.starting_seq - 1


def _position(text: str, header: Header) -> int:
    try:
        return parse_position(header.source_kind, text)
    except ConfigError as wrong:
        raise ConfigError(f"option `startingPosition`: {wrong.message}", hint=wrong.hint) from None


def newest_schema(reading: Reading) -> tuple[Reading, StructType]:
    """The columns that the table had at the end of what is read, or the envelope's."""
    if reading.options.table is None:
        return reading, from_arrow_schema(ENVELOPE)
    journal = reading.journal()
    found = reading.versions(journal)
    if not found:
        raise _unknown_table(reading.options.table, journal)
    end = min(reading.head, reading.options.ending_seq or reading.head)
    newest = last_version(journal, found, end)
    schema = from_arrow_schema(changelog.schema(found[newest]))
    if reading.options.json is Json.VARIANT:
        schema = with_variants(schema, found[newest])
    return replace(reading, derived=True), schema


def _unknown_table(table: str, journal: JournalReader) -> ConfigError:
    known = sorted({relation.table for relation in journal.relations().values()})
    near = get_close_matches(table, known, n=1, cutoff=0.5) or [name for name in known if name.endswith(f".{table}")]
    there = f"did you mean `{near[0]}`?" if near else f"it has {', '.join(known[:10]) or 'no changes of any table'}"
    return ConfigError(
        f"option `table`: the journal has no changes of {table} yet: {there}",
        hint="tables are written schema.name; to begin before a table's first change, give its schema to .schema(...)",
    )


def last_version(journal: JournalReader, versions: Mapping[int, Relation], end: int) -> int:
    """The description that the table's last retained change up to `end` has; the latest one if there is none.

    The ids do not tell: a description that comes back (a column is added and dropped) has its old one.
    """
    first, size = journal.first_seq() - 1, WINDOW
    below = end
    while below > first:
        window = SeqRange(max(first, below - size), below)
        found = [piece for piece in journal.slices(window) if piece.relation in versions]
        last = max(((_last_seq(piece, journal, window), piece.relation) for piece in found), default=(0, 0))
        if last[0] > window.start:
            return last[1]
        below, size = window.start, size * 4
    return max(versions)


def _last_seq(piece: Slice, journal: JournalReader, window: SeqRange) -> int:
    """The last of the slice's rows in the window; 0 if it has none there."""
    if piece.last_seq <= window.end:
        return piece.last_seq
    inside = read_slice(piece, journal.locations, window)
    return int(column(inside, "seq")[-1]) if len(inside) else 0
