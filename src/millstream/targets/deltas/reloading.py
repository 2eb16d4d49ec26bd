"""Delta tables copied anew while changes go on coming. See `targets.base.Reloadable` and `targets.lanes.reloading`.

Each run of rows is a commit of its own. A table without a key is emptied first, so that who reads it meanwhile
sees a part of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from millstream.failpoint import failpoint
from millstream.keyrange import KeyRange, Operand
from millstream.latest import SEQ, Latest, latest, one_letter, whole
from millstream.model import Op
from millstream.targets.base import ReloadStep
from millstream.targets.deltas.forms import Form
from millstream.targets.deltas.mirror import quoted
from millstream.targets.deltas.replaying import Tombstones, restore
from millstream.targets.deltas.spool import Spooled
from millstream.targets.deltas.tables import Handle
from millstream.targets.deltas.writer import Writer
from millstream.targets.lanes.runs import Run
from millstream.targets.lanes.tables import mirror_key


def remember_removed(stones: Tombstones, run: Run, name: str) -> None:
    """Leave tombstones for what a run of the next batch removes, while tables are copied."""
    key = mirror_key(run.relation)
    if key:
        stones.add(latest(run.changes, key), key, name)
        return
    cut = np.flatnonzero(one_letter(whole(run.changes["_ms_op"])) == Op.TRUNCATE)
    if len(cut):
        none = run.changes.slice(0, 0)
        stones.add(Latest(int(run.changes[SEQ][int(cut[-1])].as_py()), none, none), (), name)


def log_copy(writer: Writer, runs: Sequence[Callable[[], Run]], form: Form, step: ReloadStep) -> None:
    """Append a copy to the changelog; each commit says how much of it is there."""
    app = f"{writer.app}/reload/{step.mark}"
    for number, read in enumerate(runs):
        run = read()

        def commit(table: Handle, run: Run = run, number: int = number) -> None:
            done = table.transaction_version(app)
            if done is None or done < number:
                table.append(form.baseline(run.relation, run.changes), writer.said(number, app))

        writer.attempt(writer.schema_of(run.relation), run.relation, commit)
        failpoint("reload.changelog_committed")


def copy_mirror(
    writer: Writer, table: Spooled, stones: Tombstones, form: Form, step: ReloadStep, *, soft: bool
) -> None:
    """Write one step to the mirror."""
    relation, key = table.relation, mirror_key(table.relation)
    wanted = writer.schema_of(relation)
    whole_table, only = step.within is None, _only(step.within)
    if step.first:
        writer.attempt(wanted, relation, lambda handle: handle.make_older(step.seq, only), renewing=whole_table)
        failpoint("reload.versions_lowered")
    if not key:
        _replace(writer, table, stones, form, step, soft=soft)
        return
    for read in table.runs:
        run = read()

        def commit(handle: Handle, run: Run = run) -> None:
            restore(handle, run, stones, writer.said(None), soft=soft)

        writer.attempt(wanted, relation, commit)
        failpoint("reload.mirror_committed")
    if step.last:
        writer.attempt(wanted, relation, lambda handle: handle.remove_older(step.since, soft=soft, only=only))
        failpoint("reload.mirror_swept")


def _only(within: KeyRange | None) -> str:
    """The rest of a condition that leaves a range of the key."""
    return "" if within is None else f" AND {within.sql(lambda column: Operand(quoted(column.name)))}"


def _replace(writer: Writer, table: Spooled, stones: Tombstones, form: Form, step: ReloadStep, *, soft: bool) -> None:
    """Rows that cannot be told apart: what is older goes before they come."""
    wanted = writer.schema_of(table.relation)
    writer.attempt(wanted, table.relation, lambda handle: handle.remove_older(step.seq, soft=soft))
    for read in table.runs if stones.truncated() <= step.seq else ():
        run = read()

        def commit(handle: Handle, run: Run = run) -> None:
            handle.append(form.baseline(run.relation, run.changes), writer.said(None))

        writer.attempt(wanted, run.relation, commit)
        failpoint("reload.mirror_replaced")
