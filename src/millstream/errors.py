"""Every error Millstream raises on purpose.

    MillstreamError
    ├── ConfigError            a stream file or an option is wrong; nothing was started
    │   ├── SecretError        a password reference cannot be resolved
    │   └── UnknownName        a table, journal, dead letter, schema change or snapshot that was named is not there
    │       └── UnknownStream  the home has no stream, or the stream no target, of that name
    ├── DependencyError        an optional package, Java or a server binary is missing
    ├── EmbeddedError          the embedded Postgres did not do what was asked
    ├── SourceError
    │   ├── SourceUnavailable  transient: the database cannot be reached now
    │   ├── PreflightError     the database is not fit for capture; carries the findings
    │   └── SourceHalted       permanent: going on could lose or repeat rows; a person decides
    ├── JournalError
    │   ├── JournalLocked      another process writes this journal
    │   ├── JournalFull        transient: no room on the disk
    │   ├── JournalCorrupt     bytes on disk are not what was written
    │   ├── JournalMismatch    a cursor and the journal do not belong together
    │   └── OutOfRange         the asked position is not in the retained journal
    ├── ExecutorUnfit          transient: an executor of the cluster lacks the package or cannot see the journal
    ├── SparkEnded             the session that all deliveries run in is gone; the engine stops
    ├── TargetError
    │   ├── TargetUnavailable  transient: try the batch again later
    │   └── TargetRefused      permanent: this target stops, the others go on
    │       ├── CannotFollow   a table has changed so that it must be read again, or another target begun
    │       └── RowRefused     one row cannot be written: without it, or as a dead letter, the batch can
    │           ├── MissingBase    a row lacks a value that its change did not send and nobody has
    │           └── RowUnshaped    a filter or transform fails on a row
    ├── SchemaChanged          a table's columns are no longer those that a DataFrame was made with
    ├── SchemaGated            a schema change is not to be delivered before somebody has approved it
    ├── StateError             the state store cannot be read or written
    ├── SnapshotError          a snapshot of a target's state cannot be written, read or used
    │   └── SnapshotsUnavailable   transient: where snapshots are kept cannot be reached now
    ├── VerifyFailed           a target could not be compared with its source
    ├── NotReady               a stream did not come to run in time, or has failed
    ├── NotSupported           what was asked is known, but this version cannot do it
    ├── RequestFailed          the process that runs the home could not do what it was asked, or did not answer
    ├── HomeLocked             another process runs on this home
    └── BenchError
        ├── BenchRefused       no figure can be taken now: another bench runs, or the machine is busy
        └── BenchFailed        something that a bench measures did not do its work

An error says what is wrong, where, and what to do. `hint` is the last of the three, kept apart
so that a terminal can show it on its own line and JSON output can carry it as a field.
No message ever contains a secret or a value of a user's row.
"""

from __future__ import annotations

from collections.abc import Sequence


class MillstreamError(Exception):
    """Root of the tree. `transient` says whether trying the same thing again can help."""

    transient = False

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (capture to engine, worker to driver) by pickle.
        return _rebuild, (type(self), self.message, self.hint)


def _rebuild(kind: type[MillstreamError], message: str, hint: str | None) -> MillstreamError:
    return kind(message, hint=hint)


class ConfigError(MillstreamError):
    """A stream file or an option is wrong."""


class SecretError(ConfigError):
    """A password reference (`env:NAME`, `file:PATH`) cannot be resolved."""


class UnknownName(ConfigError):
    """What was named is not there: a table, a journal, a dead letter, a schema change, a snapshot. Nothing was done."""


class UnknownStream(UnknownName):
    """There is no stream, or no target of a stream, of the name that was given."""


class DependencyError(MillstreamError):
    """Something that must be installed is not."""


class EmbeddedError(MillstreamError):
    """The embedded Postgres did not start, stop or copy itself; the message has the end of its log."""


class SourceError(MillstreamError):
    """The source database and Millstream disagree."""


class SourceUnavailable(SourceError):
    """The database cannot be reached at the moment; capture retries with backoff."""

    transient = True


class PreflightError(SourceError):
    """The database is not fit for capture yet. The message lists the findings."""


class SourceHalted(SourceError):
    """Going on could lose, repeat or misread rows. Capture stops until a person has decided."""


class JournalError(MillstreamError):
    """The journal on disk cannot be used as asked."""


class JournalLocked(JournalError):
    """Another process holds the writer lock."""


class JournalFull(JournalError):
    """No room on the journal's disk; capture waits and goes on when there is."""

    transient = True


class JournalCorrupt(JournalError):
    """Bytes on disk are not the bytes that were written."""


class JournalMismatch(JournalError):
    """A cursor names another journal, or a seq or position this journal does not have."""


class OutOfRange(JournalError):
    """The asked seq, position or time lies outside what the journal retains."""


class ExecutorUnfit(MillstreamError):
    """An executor of the cluster lacks what a task needs. Another may have it: the batch is tried again."""

    transient = True


class SparkEnded(MillstreamError):
    """The Spark session that deliveries run in has ended: its JVM died, or was stopped. The engine stops, too."""


class TargetError(MillstreamError):
    """A target could not take a batch."""


class TargetUnavailable(TargetError):
    """The target cannot be reached or written at the moment; the batch is tried again."""

    transient = True


class TargetRefused(TargetError):
    """The target will never take this batch as it is; the target stops and says why."""


class CannotFollow(TargetRefused):
    """A table has changed so that a target's rows do not tell what they are now."""


class RowRefused(TargetRefused):
    """The target will never take one of the rows; it may take the others. `kind` is a dead letter's."""

    kind = "value"

    def __init__(self, message: str, *, hint: str | None = None, kind: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind or self.kind


class MissingBase(RowRefused):
    """A change left out a value that it did not change, and neither the batch nor the target has it.

    `seqs` are the changes concerned, where that is known.
    """

    kind = "missing_base"

    def __init__(
        self, message: str, *, hint: str | None = None, kind: str | None = None, seqs: Sequence[int] = ()
    ) -> None:
        super().__init__(message, hint=hint, kind=kind)
        self.seqs = tuple(seqs)


class RowUnshaped(RowRefused):
    """A filter or transform of the stream fails on a row. `column` is the one that it fails on, where that is known."""

    kind = "transform"

    def __init__(
        self, message: str, *, hint: str | None = None, kind: str | None = None, column: str | None = None
    ) -> None:
        super().__init__(message, hint=hint, kind=kind)
        self.column = column


class SchemaChanged(MillstreamError):
    """A change of a table does not fit the columns of the DataFrame it is to be read into."""


class SchemaGated(MillstreamError):
    """Delivery is before a schema change that waits for approval, was rejected, or is not to be applied."""


class StateError(MillstreamError):
    """The state store cannot be read or written."""


class SnapshotError(MillstreamError):
    """A snapshot of a target's state cannot be written or read, is damaged, or is not this target's."""


class SnapshotsUnavailable(SnapshotError):
    """The server at which snapshots are kept cannot be reached, or is too busy; a restore is tried again."""

    transient = True


class VerifyFailed(MillstreamError):
    """A target and its source could not be compared. It says nothing about whether they are equal."""


class NotReady(MillstreamError):
    """A stream did not come to run in time, or cannot. The message says what it waits for."""


class NotSupported(MillstreamError):
    """What was asked for is known, but not built in this version. Nothing was changed."""


class RequestFailed(MillstreamError):
    """The process that runs the home could not do what it was asked to, or did not answer in time."""


class HomeLocked(MillstreamError):
    """Another process runs streams on this home directory."""


class BenchError(MillstreamError):
    """No figure came of a measurement."""


class BenchRefused(BenchError):
    """A figure taken now would not mean anything."""


class BenchFailed(BenchError):
    """What was to be measured did not work, or its rig did not."""
