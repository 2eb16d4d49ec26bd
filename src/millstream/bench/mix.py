"""The load that the benches measure: five tables of ten columns, changed in a fixed, repeatable way.

A *cycle* is ten changes of one table: six inserts, three updates, one delete. Cycles go round the tables. The
same cycles are committed in three ways, the *parts* of the mix: every change a transaction of its own, two cycles
a transaction, five hundred. Values are made of the row's id, so two loads of one size are alike.

Every twentieth row has a text that is kept out of line (TOAST); updates leave that text alone, so the log says
only that it has not changed. The load is written inside the server, set by set where a transaction allows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from millstream.bench.rig import Connection

SCHEMA_NAME = "bench"
TABLES = tuple(f"{SCHEMA_NAME}.mix{number}" for number in range(1, 6))
CYCLE = 10
ROUND = CYCLE * len(TABLES)
"""Changes after which every table has had one cycle; every load is a multiple of it."""
LARGEST = 5_000


@dataclass(frozen=True)
class Part:
    """A third of the mix: `changes` committed in transactions of `transaction` rows."""

    transaction: int
    changes: int

    @property
    def name(self) -> str:
        return f"{self.transaction:,}-row transactions"

    @property
    def cycles(self) -> int:
        return self.changes // CYCLE


def parts(changes: int) -> tuple[Part, ...]:
    """The mix of at least so many changes: a third each in transactions of 1, 20 and 5,000 rows.

    Thirds are rounded up to whole transactions. A third too small for a transaction of 5,000 is one transaction.
    """
    step = LARGEST if changes >= 3 * LARGEST else ROUND
    third = -(-changes // (3 * step)) * step
    return Part(1, third), Part(20, third), Part(min(LARGEST, third), third)


class Load(Protocol):
    """What is written into a bench's tables, always the same way."""

    @property
    def warm(self) -> int:
        """Changes before the backlog: `fill`, and a round of cycles in one transaction."""

    @property
    def schema(self) -> str:
        """SQL of the tables, and of what writes into them."""

    def fill(self, connection: Connection) -> None:
        """Rows that are there before the first cycle."""

    def write(self, connection: Connection, transaction: int, first: int, last: int) -> None:
        """These cycles, in transactions of so many changes."""


class Mix:
    """The mix: tables that grow from nothing."""

    warm = ROUND

    @property
    def schema(self) -> str:
        return schema()

    def fill(self, connection: Connection) -> None:
        """Nothing."""

    def write(self, connection: Connection, transaction: int, first: int, last: int) -> None:
        connection.execute(f"CALL {SCHEMA_NAME}.load(%s, %s, %s)".encode(), (transaction, first, last))


def schema() -> str:
    """Tables, and the procedures: `bench.load(transaction, first cycle, last cycle)` writes as fast as it can,
    `bench.trickle(first cycle, last cycle, transactions a second)` keeps a pace."""
    return "\n".join([tables(), *_verbs(), _LOAD])


def tables() -> str:
    """The tables alone."""
    return "\n".join([f"CREATE SCHEMA {SCHEMA_NAME};", *map(_table, TABLES)])


def _table(name: str) -> str:
    return f"""
CREATE TABLE {name} (
    id bigint PRIMARY KEY, customer bigint NOT NULL, quantity integer NOT NULL, price numeric(12,2), note text,
    status varchar(24), changed timestamptz, paid boolean, weight double precision, due date);
ALTER TABLE {name} ALTER COLUMN note SET STORAGE EXTERNAL;"""


def _verbs() -> list[str]:
    """put, touch and take: one statement per table, so that each has a plan the session keeps."""
    put = """INSERT INTO {table} SELECT g, g * 7919 % 1000003, g % 1000, (g % 1000000) / 100.0,
        CASE WHEN g % 20 = 0 THEN repeat(md5(g::text), 80) ELSE md5(g::text) END,
        (ARRAY['new', 'paid', 'packed', 'sent', 'returned'])[1 + g % 5],
        timestamptz '2024-01-01 00:00:00+00' + g * interval '1.000001 s', g % 3 = 0, sqrt(g::float8),
        date '2024-01-01' + (g % 365)::int FROM generate_series(lo, hi) g"""
    touch = """UPDATE {table} SET quantity = quantity + 1, status = 'touched', changed = changed + interval '1 day'
        WHERE id BETWEEN lo AND hi"""
    take = "DELETE FROM {table} WHERE id BETWEEN lo AND hi"
    return [_verb("put", put), _verb("touch", touch), _verb("take", take)]


def _verb(name: str, statement: str) -> str:
    branches = "\n".join(
        f"    {'IF' if number == 1 else 'ELSIF'} t = {number} THEN {statement.format(table=table)};"
        for number, table in enumerate(TABLES, 1)
    )
    return f"""
CREATE FUNCTION {SCHEMA_NAME}.{name}(t int, lo bigint, hi bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
{branches}
    END IF;
END $$;"""


_LOAD = f"""
-- Cycle c is the n-th of its table: it inserts ids 6n-5 to 6n, updates 3n to 3n+2, deletes n. All of them are there.
CREATE FUNCTION {SCHEMA_NAME}.cycles(t int, n bigint, m bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM {SCHEMA_NAME}.put(t, 6 * n - 5, 6 * m);
    PERFORM {SCHEMA_NAME}.touch(t, 3 * n, 3 * m + 2);
    PERFORM {SCHEMA_NAME}.take(t, n, m);
END $$;

CREATE PROCEDURE {SCHEMA_NAME}.load(transaction int, first bigint, last bigint) LANGUAGE plpgsql AS $$
DECLARE
    step bigint := transaction / {CYCLE};
    n bigint;
    t int;
BEGIN
    IF transaction = 1 THEN
        FOR c IN first .. last LOOP
            t := 1 + (c - 1) % {len(TABLES)};
            n := 1 + (c - 1) / {len(TABLES)};
            FOR id IN 6 * n - 5 .. 6 * n LOOP
                PERFORM {SCHEMA_NAME}.put(t, id, id);
                COMMIT;
            END LOOP;
            FOR id IN 3 * n .. 3 * n + 2 LOOP
                PERFORM {SCHEMA_NAME}.touch(t, id, id);
                COMMIT;
            END LOOP;
            PERFORM {SCHEMA_NAME}.take(t, n, n);
            COMMIT;
        END LOOP;
    ELSIF transaction < {ROUND} THEN
        FOR c IN first .. last LOOP
            n := 1 + (c - 1) / {len(TABLES)};
            PERFORM {SCHEMA_NAME}.cycles((1 + (c - 1) % {len(TABLES)})::int, n, n);
            IF (c - first + 1) % step = 0 THEN
                COMMIT;
            END IF;
        END LOOP;
    ELSE
        FOR c IN first .. last BY step LOOP
            n := 1 + (c - 1) / {len(TABLES)};
            FOR number IN 1 .. {len(TABLES)} LOOP
                PERFORM {SCHEMA_NAME}.cycles(number, n, (least(c + step - 1, last)) / {len(TABLES)});
            END LOOP;
            COMMIT;
        END LOOP;
    END IF;
END $$;

-- The same cycles in transactions of two, so many of them a second, each at its own time.
CREATE PROCEDURE {SCHEMA_NAME}.trickle(first bigint, last bigint, a_second float8) LANGUAGE plpgsql AS $$
DECLARE
    began timestamptz := clock_timestamp();
    n bigint;
BEGIN
    FOR c IN first .. last BY 2 LOOP
        PERFORM pg_sleep_until(began + (c - first) / 2 / a_second * interval '1 s');
        FOR one IN c .. c + 1 LOOP
            n := 1 + (one - 1) / {len(TABLES)};
            PERFORM {SCHEMA_NAME}.cycles((1 + (one - 1) % {len(TABLES)})::int, n, n);
        END LOOP;
        COMMIT;
    END LOOP;
END $$;
"""
