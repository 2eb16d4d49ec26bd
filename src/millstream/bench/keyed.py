"""Changes over a fixed number of keys: what a mirror has to keep up with.

The tables are those of the mix. They are filled first; then a *cycle* is ten changes of one table: two rows come,
six are updated, two go. What goes comes back a hundred cycles later, so that there are always as many rows as before.
Updates go through all other rows in large, even steps. Cycles go round the tables and are committed as those of
the mix are: every change a transaction of its own, or two or five hundred cycles a transaction.
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream.bench import mix
from millstream.bench.mix import CYCLE, ROUND, SCHEMA_NAME, TABLES
from millstream.bench.rig import Connection
from millstream.errors import ConfigError

LEAST = 10_000
"""Keys below which rows that are gone and rows that are updated would meet."""
AWAY = 100
"""Cycles of a table after which its rows come back."""
FILL_ROWS = 20_000
"""Rows in a transaction while the tables are filled."""


@dataclass(frozen=True)
class Keyed:
    """So many keys, and the changes over them. Raises ConfigError for fewer keys than the load needs."""

    keys: int

    def __post_init__(self) -> None:
        step = 2 * len(TABLES)
        if self.keys < LEAST or self.keys % step:
            raise ConfigError(f"a bench of {self.keys} keys: it must be a multiple of {step}, and {LEAST} at least")

    @property
    def warm(self) -> int:
        """Changes before the backlog: the rows, and a round of cycles."""
        return self.keys - 2 * AWAY * len(TABLES) + ROUND

    @property
    def schema(self) -> str:
        return f"{mix.schema()}\n{_CHURN}"

    def fill(self, connection: Connection) -> None:
        connection.execute("CALL bench.fill(%s)", (self._of_a_table,))

    def write(self, connection: Connection, transaction: int, first: int, last: int) -> None:
        connection.execute("CALL bench.churn(%s, %s, %s, %s)", (transaction, first, last, self._of_a_table))

    @property
    def _of_a_table(self) -> int:
        return self.keys // len(TABLES)


_CHURN = f"""
-- The rows of a table but those that are away when the first cycle begins: the last {2 * AWAY}.
CREATE PROCEDURE {SCHEMA_NAME}.fill(keys bigint) LANGUAGE plpgsql AS $$
BEGIN
    FOR t IN 1 .. {len(TABLES)} LOOP
        FOR lo IN 1 .. keys - {2 * AWAY} BY {FILL_ROWS} LOOP
            PERFORM {SCHEMA_NAME}.put(t, lo, least(lo + {FILL_ROWS} - 1, keys - {2 * AWAY}));
            COMMIT;
        END LOOP;
    END LOOP;
END $$;

-- Cycle n of a table: rows 2n-1 and 2n go, those that went {AWAY} cycles before come back, all counted round the keys.
-- Rows are updated from {5 * AWAY} after 2n to {5 * AWAY} before it, so that none of them is away.
CREATE PROCEDURE {SCHEMA_NAME}.churn(transaction int, first bigint, last bigint, keys bigint) LANGUAGE plpgsql AS $$
DECLARE
    n bigint;
    t int;
    id bigint;
    around bigint := keys - {10 * AWAY};
BEGIN
    FOR c IN first .. last LOOP
        t := 1 + (c - 1) % {len(TABLES)};
        n := 1 + (c - 1) / {len(TABLES)};
        FOR j IN 0 .. 1 LOOP
            id := 1 + (2 * (n - {AWAY}) + j - 2 + keys) % keys;
            PERFORM {SCHEMA_NAME}.put(t, id, id);
            IF transaction = 1 THEN COMMIT; END IF;
        END LOOP;
        FOR j IN 0 .. 5 LOOP
            id := 1 + (2 * n + {5 * AWAY} + (6 * n + j) * 7919 % around) % keys;
            PERFORM {SCHEMA_NAME}.touch(t, id, id);
            IF transaction = 1 THEN COMMIT; END IF;
        END LOOP;
        FOR j IN 0 .. 1 LOOP
            id := 1 + (2 * n + j - 2) % keys;
            PERFORM {SCHEMA_NAME}.take(t, id, id);
            IF transaction = 1 THEN COMMIT; END IF;
        END LOOP;
        IF transaction > 1 AND (c - first + 1) % (transaction / {CYCLE}) = 0 THEN
            COMMIT;
        END IF;
    END LOOP;
END $$;
"""
