"""What an `Engine` can do about dead letters: show them, deliver them again, give them up."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.engine.engine_part import EnginePart
from millstream.engine.redelivery import Outcome
from millstream.engine.unknown import is_for, unknown_stream, unknown_target
from millstream.errors import UnknownName
from millstream.names import instead
from millstream.state.base import Letter, StateStore


class EngineLetters(EnginePart):
    """The part of `Engine` that is about changes which targets could not take."""

    def dead_letters(
        self, name: str | None = None, target: str | None = None, table: str | None = None
    ) -> list[Letter]:
        """The changes that targets could not take, oldest first, without the rows: all, or those of what is named.

        Raises UnknownStream, and UnknownName for a table that is no stream's.
        """
        with self._reading() as store:
            if store is None:
                if name is not None:
                    raise unknown_stream(name, [], self._home)
                return []
            found = store.letters(name)
            self._refuse_unknown(store, found, name, target, table)
        return [one for one in found if target in (None, one.target) and table in (None, one.table)]

    def _refuse_unknown(
        self, store: StateStore, letters: Sequence[Letter], name: str | None, target: str | None, table: str | None
    ) -> None:
        streams = store.list_streams()
        if name is not None and name not in streams:
            raise unknown_stream(name, streams, self._home)
        chosen = {one: store.get_stream(one) or {} for one in ([name] if name is not None else streams)}
        what = f"stream {name}" if name is not None else f"the home {self._home.path}"
        targets = {one["name"] for defined in chosen.values() for one in defined["targets"]}
        targets |= {one.target for one in letters}
        if target is not None and target not in targets:
            raise unknown_target(what, target, sorted(targets))
        tables = {one.table for one in letters}
        patterns = [pattern for defined in chosen.values() for pattern in defined["source"]["tables"]]
        if table is not None and table not in tables and not is_for(patterns, table):
            raise UnknownName(f"{what} has no table {table}: {instead(table, sorted(tables | set(patterns)))}")

    def dead_letter(self, id: int) -> Letter:
        """One of them, with its row. Raises UnknownName."""
        with self._reading() as store:
            found = store.get_letter(id) if store is not None else None
        if found is None:
            raise UnknownName(f"there is no dead letter {id}", hint="see `millstream dlq list`")
        return found

    def retry_letters(self, ids: Sequence[int]) -> list[Outcome]:
        """Deliver dead letters once more. One whose row was written by a later change is removed instead.

        Delivery to their targets pauses meanwhile. What still cannot be taken stays, with the new reason.
        Raises UnknownName before anything is done.
        """
        if self.is_running:
            done = self._do_later(lambda operations: operations.retry_letters(ids))
        else:
            done = self._ask("retry_letters", {"ids": list(ids)})
        return [Outcome(**one) for one in done["letters"]]

    def purge_letters(self, ids: Sequence[int]) -> int:
        """Give up dead letters: the target's rows stay as they are. Returns how many were removed."""
        if self.is_running:
            return self._do(lambda operations: operations.purge_letters(ids))
        return int(self._ask("purge_letters", {"ids": list(ids)})["purged"])
