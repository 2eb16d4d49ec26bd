"""Where the decode side of each kind of source is found, by the relation alone."""

from __future__ import annotations

from functools import lru_cache

import pyarrow as pa

from millstream.errors import JournalCorrupt
from millstream.model import Relation
from millstream.sources.base import Decoder
from millstream.sources.postgres.decode import PostgresDecoder
from millstream.sources.postgres.messages import MESSAGES, MessageDecoder
from millstream.sources.postgres.types import column_types
from millstream.sources.scripted import decode as scripted
from millstream.sources.scripted.script import KIND as SCRIPTED


@lru_cache(maxsize=1024)
def decoder(relation: Relation) -> Decoder:
    """The decoder for a relation. Made once per description and process."""
    if relation.source_kind == SCRIPTED:
        return scripted.ScriptedDecoder(relation)
    if relation.source_kind != "postgres":
        raise JournalCorrupt(
            f"{relation.table} comes from a source of kind {relation.source_kind!r}, which this version cannot decode",
            hint="use the version of millstream that wrote the journal, or a newer one",
        )
    return MessageDecoder(relation) if _is_messages(relation) else PostgresDecoder(relation)


def decoded_schema(relation: Relation) -> pa.Schema:
    """The columns that the relation's decoder gives, without decoding anything: planners need no more."""
    decoder(relation)
    if relation.source_kind == SCRIPTED:
        return scripted.arrow_schema(relation)
    types = column_types(relation)
    return pa.schema([pa.field(c.name, t.arrow) for c, t in zip(relation.columns, types, strict=True)])


def messages(source_kind: str) -> Relation:
    """The description of relation id 0: messages that applications put into the log."""
    if source_kind == SCRIPTED:
        return scripted.MESSAGES
    if source_kind != "postgres":
        raise JournalCorrupt(f"a source of kind {source_kind!r} has no logical messages")
    return MESSAGES


def _is_messages(relation: Relation) -> bool:
    return relation.oid == MESSAGES.oid and len(relation.columns) == len(MESSAGES.columns)
