"""The server's binary form of values (`binary 'true'` of pgoutput) to the same columns that its text gives.

`READERS` names, by `pg_type.typname`, the types whose binary form is read. A reader is given a binary
array of the values as sent and the Arrow type that the column has: the one of the type's entry in
`types`, or a string where the column must be text (a key), which then is the server's text to the
letter. The same makes the text of values that have no home. Bytes that are no value of the type are
JournalCorrupt: no server sends them.

What is not read, so that tables with such columns are captured as text, is in `wire`, each with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping

from millstream.sources.postgres.binary import network, numbers, others, ranges, search, times
from millstream.sources.postgres.binary.arrays import ArrayReader, VectorReader
from millstream.sources.postgres.binary.numeric import numeric
from millstream.sources.postgres.casts import Reader

READERS: Mapping[str, Reader] = {
    **numbers.READERS,
    "numeric": numeric,
    **others.READERS,
    **network.READERS,
    **times.READERS,
    **ranges.READERS,
    **search.READERS,
    "int2vector": VectorReader(numbers.READERS["int2"], "int2vector"),
    "oidvector": VectorReader(numbers.READERS["oid"], "oidvector"),
}

__all__ = ["READERS", "ArrayReader"]
