"""What a Delta mirror, or a history of now, holds, for a comparison with the source; and the repair of what differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.latest import SEQ, special_maps, special_texts, whole_numbers
from millstream.model import Json, Relation
from millstream.targets.base import Correction
from millstream.targets.deltas.mirror import mirror_schema, quoted, widened
from millstream.targets.deltas.partitions import restored
from millstream.targets.deltas.tables import Handle, lake_schema
from millstream.targets.directory import directory_of
from millstream.targets.forms import form_schema
from millstream.targets.lanes.tables import SPECIAL, mirror_key

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    from deltalake import CommitProperties

PARTS = 16
"""In so many parts a table of many files is read."""

LIVING = ~pc.field("_ms_deleted")
"""Of rows that stay when they are deleted, those that are not."""

_STATE = "_ms_state"
_ROW, _STALE, _GONE = 0, 1, 2


def table_path(root: str, relation: Relation) -> Path:
    """Where a relation's table is. Delta-rs takes an encoded name for a URL and decodes it."""
    return Path(root) / directory_of(relation).replace("%", "+")


@dataclass(frozen=True)
class MirrorReader:
    """See `targets.base.Reader` for the contract. Its form has the types of Delta."""

    root: str
    living: ds.Expression | None
    """What holds for rows that are there; None: all of them are."""
    parallel = True

    def parts(self, relation: Relation) -> Sequence[Json]:
        table = Handle.existing(table_path(self.root, relation))
        if table is None:
            return ()
        count = max(1, min(PARTS, table.files()))
        return [{"version": table.version(), "part": part, "of": count} for part in range(count)]

    def read(self, relation: Relation, part: Json) -> Iterator[pa.Table]:
        wanted = lake_schema(form_schema(relation))
        table = Handle.existing(table_path(self.root, relation), part["version"])
        for batch in table.batches(part["part"], part["of"], wanted.names, self.living) if table else ():
            columns = [
                batch[field.name].cast(field.type)
                if field.name in batch.schema.names
                else pa.nulls(batch.num_rows, field.type)
                for field in wanted
            ]
            yield restored(pa.table(columns, schema=wanted), table.partitions() if table else ())

    def expected(self, relation: Relation, rows: pa.RecordBatch) -> pa.Table:
        wanted = form_schema(relation)
        return pa.Table.from_batches([rows]).select(wanted.names).cast(lake_schema(wanted))


def correct_mirror(
    table: Handle, wrong: Correction, right: pa.Table, seq: int, said: CommitProperties, *, soft: bool
) -> None:
    """Replace what is wrong in one MERGE: rows under wrong keys match and go, right ones match nothing and come."""
    wanted = lake_schema(mirror_schema(wrong.relation, soft=False))
    key = mirror_key(wrong.relation)
    special = special_maps(special_texts(right), right.num_rows)
    rows = right.select([name for name in wanted.names if name != SPECIAL]).append_column(SPECIAL, special)
    wrong_keys = [(wrong.stale, _STALE), (wrong.gone, _GONE)]
    source = pa.concat_tables(
        [
            _marked(rows.select(wanted.names).cast(wanted), _ROW),
            *(_marked(_versioned(keys, wanted, seq), state) for keys, state in wrong_keys),
        ]
    )
    on = " AND ".join(f"s.{quoted(name)} = t.{quoted(name)}" for name in key)
    values = {quoted(name): f"s.{quoted(name)}" for name in wanted.names}
    steps = {"insert": (values | ({"_ms_deleted": "false"} if soft else {}), f"s.{_STATE} = {_ROW}")}
    delete = f"s.{_STATE} = {_STALE}" if soft else f"s.{_STATE} <> {_ROW}"
    if soft:
        steps["mark"] = ({"_ms_deleted": "true", "_ms_seq": "s._ms_seq"}, f"s.{_STATE} = {_GONE}")
    table.merge(source, f"s.{_STATE} <> {_ROW} AND {on}", steps, delete, said)


def _marked(rows: pa.Table, state: int) -> pa.Table:
    return rows.append_column(_STATE, whole_numbers(np.full(rows.num_rows, state)))


def _versioned(keys: pa.Table, wanted: pa.Schema, seq: int) -> pa.Table:
    return widened(keys.append_column(SEQ, whole_numbers(np.full(keys.num_rows, seq))), wanted)
