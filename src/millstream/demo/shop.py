"""A small shop whose tables and traffic touch every kind of change a log can carry.

The demo runs it for people to watch; the chaos tests run it to lose a row. All randomness comes
from one seed, so that a failed run can be had again.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psycopg

SCHEMA = """
CREATE TYPE order_status AS ENUM ('draft', 'placed', 'paid', 'shipped', 'returned');
CREATE TABLE customers (
    id bigint PRIMARY KEY, name text NOT NULL, email varchar(120), vip boolean NOT NULL DEFAULT false,
    score double precision, born date, token uuid NOT NULL DEFAULT gen_random_uuid());
CREATE TABLE products (
    sku text PRIMARY KEY, price numeric(12,2) NOT NULL, stock integer NOT NULL, manual text,
    picture bytea, attributes jsonb);
ALTER TABLE products ALTER COLUMN manual SET STORAGE EXTERNAL;
CREATE TABLE orders (
    id bigint PRIMARY KEY, customer bigint NOT NULL, status order_status NOT NULL,
    total numeric(12,2) NOT NULL, placed_at timestamptz NOT NULL DEFAULT clock_timestamp(), due timestamp, note text);
CREATE TABLE order_items (
    order_id bigint, line smallint, sku text NOT NULL, quantity integer NOT NULL, price numeric(12,2) NOT NULL,
    PRIMARY KEY (order_id, line));
CREATE TABLE prices (sku text PRIMARY KEY, price numeric(12,2), rate real, reason text);
ALTER TABLE prices REPLICA IDENTITY FULL;
CREATE TABLE carts (id bigint PRIMARY KEY, customer bigint NOT NULL, sku text, added timestamptz DEFAULT now());
CREATE TABLE visits (customer bigint, page text, at timestamptz DEFAULT clock_timestamp());
"""

TABLES = ("customers", "products", "orders", "order_items", "prices", "carts", "visits")
"""`visits` has no primary key: it is captured insert-only, and the application may still change it."""


_HISTORY = (
    """INSERT INTO customers (id, name, email, vip, score, born)
    SELECT i, 'customer ' || md5(i::text), md5(i::text) || '@example.com', i %% 10 = 0,
        CASE WHEN i %% 100 = 0 THEN 'NaN' ELSE i / 7.0 END,
        CASE WHEN i %% 150 = 0 THEN 'infinity' ELSE date '1950-01-01' + i %% 20000 END
    FROM generate_series(1, %(customers)s) i""",
    """INSERT INTO products SELECT 'P' || i, i %% 500 + 0.99, i %% 300,
        CASE WHEN i %% 2 = 0 THEN repeat(md5(i::text), 150) END,
        decode(md5(i::text), 'hex'), jsonb_build_object('colour', md5(i::text), 'weight', i / 3.0)
    FROM generate_series(1, %(products)s) i""",
    """INSERT INTO orders SELECT i, 1 + i %% %(customers)s,
        (ARRAY['placed', 'paid', 'shipped']::order_status[])[1 + i %% 3], i %% 900 + 0.5,
        timestamptz '2020-01-01' + i * interval '1 minute', timestamp '2020-02-01' + i * interval '1 minute',
        CASE WHEN i %% 4 = 0 THEN 'note ' || i END
    FROM generate_series(1, %(orders)s) i""",
    """INSERT INTO order_items SELECT o.id, line, 'P' || 1 + (o.id + line) %% %(products)s, 1 + line, o.total
    FROM orders o, generate_series(1, 2) line""",
)


@dataclass
class Tally:
    """What the load did so far. Written by the load's thread alone."""

    transactions: int = 0
    statements: int = 0
    kinds: dict[str, int] = field(default_factory=dict)


class Shop:
    """The shop's application: one connection, one random transaction after another."""

    def __init__(self, uri: str, seed: int, *, empties_carts_every: float = 0.0) -> None:
        """The carts are truncated at random, but not sooner than so many seconds after the last time."""
        self._uri = uri
        self._empties_carts_every = empties_carts_every
        self._emptied_at = float("-inf")
        self._random = random.Random(seed)  # noqa: S311 - test data, not secrets
        self._next = {"customer": 0, "order": 0, "cart": 0, "product": 0}
        self.tally = Tally()

    def create(self) -> None:
        """Create the tables, without rows: the stream must see every row from its first change on."""
        with psycopg.connect(self._uri, autocommit=True) as connection:
            connection.execute(SCHEMA)

    def fill(self, customers: int = 2_000, products: int = 200, orders: int = 10_000) -> int:
        """Rows from before anybody looked, as a shop has them that has traded for years. Returns how many."""
        sizes = {"customers": customers, "products": products, "orders": orders}
        with psycopg.connect(self._uri) as connection, connection.cursor() as cursor:
            for statement in _HISTORY:
                cursor.execute(statement, sizes)
            cursor.execute("SELECT count(*) FROM order_items")
            ((items,),) = cursor.fetchall()
        self._next.update(customer=customers, product=products, order=orders)
        return int(items) + sum(sizes.values())

    def open_doors(self, customers: int = 200, products: int = 50) -> None:
        """Put the first customers and products in, in one transaction."""
        with psycopg.connect(self._uri) as connection, connection.cursor() as cursor:
            for _ in range(products):
                self._add_product(cursor)
            for _ in range(customers):
                self._add_customer(cursor)
        self.tally.transactions += 1

    def trade(
        self, stop: threading.Event, pause: float = 0.0, on_error: Callable[[psycopg.Error], bool] | None = None
    ) -> None:
        """Run transactions until `stop` is set, reconnecting when the server went away.

        `on_error` may say (True) that an error was expected, as when a test kills the server; the
        transaction it hit is then forgotten, whether or not the server had committed it.
        """
        while not stop.is_set():
            try:
                with psycopg.connect(self._uri) as connection:
                    while not stop.is_set():
                        self.step(connection)
                        if pause:
                            stop.wait(pause)
            except psycopg.OperationalError as lost:
                if on_error is None or not on_error(lost):
                    raise
                stop.wait(0.2)

    def step(self, connection: psycopg.Connection) -> None:
        """One random transaction, committed (or, now and then, rolled back)."""
        kinds = (
            [self._place_order] * 30
            + [self._move_orders] * 16
            + [self._reprice] * 10
            + [self._fill_cart] * 10
            + [self._visit] * 8
            + [self._sell] * 10
            + [self._rewrite_manual] * 3
            + [self._rename_product] * 4
            + [self._swap_skus] * 1
            + [self._forget_orders] * 4
            + [self._move_customer] * 3
            + [self._empty_carts] * 1
            + [self._change_mind] * 3
            + [self._stocktaking] * 1
        )
        kind = self._random.choice(kinds)
        with connection.cursor() as cursor:
            kept = kind(cursor)
        if kept is False:
            connection.rollback()
        else:
            connection.commit()
        self.tally.transactions += 1
        self.tally.kinds[kind.__name__.strip("_")] = self.tally.kinds.get(kind.__name__.strip("_"), 0) + 1

    # What the application does. Each method is one transaction; False asks for a rollback.

    def _place_order(self, cursor: psycopg.Cursor) -> None:
        order, customer = self._number("order"), self._random.randint(1, max(self._next["customer"], 1))
        lines = self._random.randint(1, 6)
        note = None if self._random.random() < 0.6 else self._text(20, 200)
        self._run(
            cursor,
            "INSERT INTO orders (id, customer, status, total, due, note) "
            "VALUES (%s, %s, 'placed', %s, now()::timestamp, %s)",
            (order, customer, self._money(), note),
        )
        for line in range(lines):
            self._run(
                cursor,
                "INSERT INTO order_items SELECT %s, %s, sku, %s, price FROM products "
                "ORDER BY hashtext(sku || %s) LIMIT 1",
                (order, line, self._random.randint(1, 9), str(order)),
            )

    def _move_orders(self, cursor: psycopg.Cursor) -> None:
        status = self._random.choice(["paid", "shipped", "returned"])
        self._run(
            cursor,
            "UPDATE orders SET status = %s WHERE id IN (SELECT id FROM orders ORDER BY hashint8(id + %s) LIMIT 5)",
            (status, self._random.randint(0, 1 << 30)),
        )

    def _reprice(self, cursor: psycopg.Cursor) -> None:
        self._run(
            cursor,
            "INSERT INTO prices SELECT sku, price, %s, %s FROM products ORDER BY hashtext(sku || %s) LIMIT 3 "
            "ON CONFLICT (sku) DO UPDATE SET price = excluded.price + 1, rate = excluded.rate",
            (self._random.random(), self._text(5, 40), str(self._random.random())),
        )

    def _fill_cart(self, cursor: psycopg.Cursor) -> None:
        for _ in range(self._random.randint(1, 4)):
            self._run(
                cursor,
                "INSERT INTO carts (id, customer, sku) VALUES (%s, %s, %s)",
                (self._number("cart"), self._random.randint(1, 1000), self._text(3, 9)),
            )

    def _visit(self, cursor: psycopg.Cursor) -> None:
        for _ in range(self._random.randint(1, 10)):
            self._run(cursor, "INSERT INTO visits VALUES (%s, %s)", (self._random.randint(1, 1000), self._text(5, 30)))

    def _sell(self, cursor: psycopg.Cursor) -> None:
        # `manual` is stored out of line and not touched here: the log leaves it out.
        self._run(
            cursor,
            "UPDATE products SET stock = stock - 1, price = price + 0.01 "
            "WHERE sku IN (SELECT sku FROM products ORDER BY hashtext(sku || %s) LIMIT 4)",
            (str(self._random.random()),),
        )

    def _rewrite_manual(self, cursor: psycopg.Cursor) -> None:
        self._run(
            cursor,
            "UPDATE products SET manual = %s "
            "WHERE sku = (SELECT sku FROM products ORDER BY hashtext(sku || %s) LIMIT 1)",
            (self._manual(), str(self._random.random())),
        )

    def _rename_product(self, cursor: psycopg.Cursor) -> None:
        # A primary key change whose out-of-line manual stays under the old key.
        self._run(
            cursor,
            "UPDATE products SET sku = %s WHERE sku = (SELECT sku FROM products ORDER BY hashtext(sku || %s) LIMIT 1)",
            (f"P{self._number('product')}", str(self._random.random())),
        )

    def _swap_skus(self, cursor: psycopg.Cursor) -> bool:
        cursor.execute("SELECT sku FROM products ORDER BY hashtext(sku || %s) LIMIT 2", (str(self._random.random()),))
        pair = [row[0] for row in cursor.fetchall()]
        if len(pair) < 2:
            return False
        for old, new in ((pair[0], "swap"), (pair[1], pair[0]), ("swap", pair[1])):
            self._run(cursor, "UPDATE products SET sku = %s WHERE sku = %s", (new, old))
        return True

    def _forget_orders(self, cursor: psycopg.Cursor) -> None:
        cursor.execute("SELECT id FROM orders ORDER BY id LIMIT 3")
        for (order,) in cursor.fetchall():
            self._run(cursor, "DELETE FROM order_items WHERE order_id = %s", (order,))
            self._run(cursor, "DELETE FROM orders WHERE id = %s", (order,))

    def _move_customer(self, cursor: psycopg.Cursor) -> None:
        self._run(
            cursor,
            "UPDATE customers SET id = %s WHERE id = (SELECT id FROM customers ORDER BY hashint8(id + %s) LIMIT 1)",
            (self._number("customer"), self._random.randint(0, 1 << 30)),
        )

    def _empty_carts(self, cursor: psycopg.Cursor) -> None:
        if time.monotonic() - self._emptied_at >= self._empties_carts_every:
            self._run(cursor, "TRUNCATE carts", ())
            self._emptied_at = time.monotonic()
        self._fill_cart(cursor)

    def _change_mind(self, cursor: psycopg.Cursor) -> bool:
        self._place_order(cursor)
        if self._random.random() < 0.5:
            return False
        cursor.execute("SAVEPOINT maybe")
        self._fill_cart(cursor)
        cursor.execute("ROLLBACK TO SAVEPOINT maybe")
        return True

    def _stocktaking(self, cursor: psycopg.Cursor) -> None:
        self._run(cursor, "UPDATE products SET stock = stock + %s", (self._random.randint(1, 50),))
        self._add_customer(cursor)

    # Values

    def _add_product(self, cursor: psycopg.Cursor) -> None:
        self._run(
            cursor,
            "INSERT INTO products VALUES (%s, %s, %s, %s, %s, %s)",
            (
                f"P{self._number('product')}",
                self._money(),
                self._random.randint(0, 500),
                self._manual() if self._random.random() < 0.5 else None,
                self._random.randbytes(self._random.randint(0, 40)),
                json.dumps({"colour": self._text(3, 8), "weight": self._random.random()}),
            ),
        )

    def _add_customer(self, cursor: psycopg.Cursor) -> None:
        odd = self._random.random() < 0.01
        self._run(
            cursor,
            "INSERT INTO customers (id, name, email, vip, score, born) VALUES (%s, %s, %s, %s, %s, %s)",
            (
                self._number("customer"),
                self._text(3, 30),
                f"{self._text(3, 10)}@example.com" if self._random.random() < 0.9 else None,
                self._random.random() < 0.1,
                float("nan") if odd else self._random.gauss(0, 100),
                "infinity" if odd else f"{self._random.randint(1900, 2020)}-0{self._random.randint(1, 9)}-11",
            ),
        )

    def _run(self, cursor: psycopg.Cursor, statement: str, values: tuple[object, ...]) -> None:
        cursor.execute(statement.encode(), values)
        self.tally.statements += 1

    def _number(self, what: str) -> int:
        self._next[what] += 1
        return self._next[what]

    def _money(self) -> str:
        return f"{self._random.randint(0, 99999)}.{self._random.randint(0, 99):02d}"

    def _text(self, least: int, most: int) -> str:
        return "".join(self._random.choices("abcdefghij klmnopqrstuvwxyzäß€'\"\\", k=self._random.randint(least, most)))

    def _manual(self) -> str:
        return self._text(20, 40) * self._random.randint(100, 300)
