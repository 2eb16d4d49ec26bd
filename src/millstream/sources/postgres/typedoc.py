"""The page about types, made from the table: python -m millstream.sources.postgres.typedoc > docs/types/postgres.md"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from millstream.sources.postgres.connection import SESSION_SETTINGS
from millstream.sources.postgres.types import BY_OID, CHOICES, EXTENSIONS, NUMERIC_OID, TYPES, PgType
from millstream.sources.postgres.wire import CHAR_NOTE, NOT_READ

_WRITTEN = {
    "bool": "boolean",
    "int2": "smallint",
    "int4": "integer",
    "int8": "bigint",
    "float4": "real",
    "float8": "double precision",
    "varchar": "varchar(n)",
    "bpchar": "char(n)",
    "char": '"char"',
    "bit": "bit(n)",
    "varbit": "varbit(n)",
    "timestamptz": "timestamp with time zone",
    "timetz": "time with time zone",
}
"""How people write the types that the catalog names otherwise."""

_HOMELESS = {"time": "24:00:00", "timetz": "", "interval": "infinity and -infinity, which Postgres has since 17"}
"""What the types of choice cannot hold."""

_DECLARED = ((12, 2), (38, 10), (5, -2), (39, 1), (38, -1), (3, 5))

_HEAD = """# Postgres types

<!-- Made by `make docs` from src/millstream/sources/postgres/types.py. Change that file, not this one. -->

What a column of each Postgres type becomes. Nothing is rounded, cut or guessed. [Which types are
proven](matrix.md), on which servers, is written by the tests.

**Values without a home.** Some types have values that the column's type cannot hold. Such a value is NULL in
its column, and `_ms_special` (a map) has the column's name with the exact text, as the server writes it; for
the old row the name is `_ms_before.<column>`. A NULL of the source has no entry there, so the two are never
mistaken. Text that is not valid UTF-8 is treated alike, and stands there as `\\x` and hexadecimal digits.

**Keys.** A column that identifies rows must not be NULL in that way. So a key column of a type that has such
values (marked in the tables) is `string`, its exact text. Where whole rows are the identity (`REPLICA IDENTITY
FULL` without a primary key) no single column is a key, and all keep their types.

**Text.** The text of a value is what the server writes with the session settings that Millstream pins: {settings}.

**Binary.** With `wire: binary` the server sends the same values in its binary form, and they become the same
columns, to the bit and to the letter. It is possible for tables whose columns are all of types that the tables below
mark so, and arrays of them; `millstream check` names any other column. If one is added later, capture halts before it
takes over a change of that table: nothing is lost, and with `wire: text` it goes on where it stood. Built-in types
that cannot be the same in both forms, and so travel as text only:

{unread}
- `"char"` {char}.

Types that are not built in (enums, domains, composite types, ranges of users, extensions' types) have no number that
is the same on every server, and travel as text only too. Two values differ: the outermost intervals (178956970 years, 7
months, 2147483647 days and 2562047788 hours, and their counterpart below zero) are infinity in binary form, which they
are by definition since Postgres 17; the text of an older server spells them out.

**SQL_ASCII.** A database with this encoding takes any bytes for text. There every column that is `string` below is
`binary` (in arrays, too), holding the bytes as they are, except for types whose text is ASCII by nature: numbers,
dates, times, uuid, bits, addresses, shapes, ranges, positions. A name, default or enum label that is no UTF-8 is
refused with a clear error. `wire: binary` is not possible there.
"""

_NUMERIC = """
## numeric(p,s)

A decimal where Spark has one: `0 <= s <= p <= 38`, and for a negative scale `decimal(p-s,0)` if that has at most
38 digits. Otherwise, and where nothing is declared, it is a string. In a decimal NaN and
the infinities have no home.

| declared | Spark | Arrow |
|---|---|---|
{rows}
"""

_ARRAYS = """
## Arrays

An array of a type in these tables is `array<T>`, T being what a column of that type becomes; elements may be NULL.
`numeric(12,2)[]` is `array<decimal(12,2)>`. A list has one dimension, is counted from its begin, and its elements
have the type of its elements. So an array goes to `_ms_special` as a whole when

- it has several dimensions: `{{{{1,2}},{{3,4}}}}`;
- it has bounds of its own: `[0:1]={{1,2}}`;
- an element has no home in T: `{{1.50,NaN}}` in a `numeric(12,2)[]`.

An array of an enum, a composite type, a range, a domain or an extension's type is `array<string>`: the exact text of
each element. (The catalog tells which character divides the elements. Where it could not be asked, the whole array
is text.)

## Types of your choice

With `types` in the source's part of the [stream file](../stream-file.md#column-types), columns of these types,
arrays of them and domains over them become something else than text. The choice is kept with the description of the
table in the journal, so everything that reads a change, now or later, sees the same type.

| choice | Spark | Arrow | without a home |
|---|---|---|---|
{choices}

Spark 4.2 and 4.3 carry TIME in a DataFrame, but read it from a file only with `spark.sql.timeType.enabled=true`.

`json` and `jsonb` become VARIANT in a DataFrame of [`format("millstream")`](../spark.md) with its option
`json=variant`. A value that no VARIANT holds exactly (a number with too many digits, a key that is there twice) is
NULL there, with its text in `_ms_special`. Files are written by Arrow, which has no VARIANT: they have the text, and
`parse_json(column)` reads it.

## Types that users make

| type | becomes |
|---|---|
| domain | what its base type becomes, with the precision declared there |
| enum | `string`, the label |
| composite | `string`, the server's text: `(1,"a b",)` |
| range, multirange | `string`, the server's text: `[1,5)` |
| any other | `string`, the server's text |

A composite is not a struct, because the log names its type by number only: the fields are known to the live catalog
alone, which may have changed since, and the change of a type's fields is not in the log. What a domain is made of comes
from the catalog too; if it no longer had the domain when the change was captured, the column is text.

## Large values

A value arrives whole up to what Postgres can send: 1 GB for a row as text, where a `bytea` counts twice and an old row
that is sent along counts too. Capture takes about four times the largest row in memory. A change beyond the limit
cannot be read from the log by anyone: capture halts before it, says so, and keeps everything up to it.

## Extensions

Extensions' types have no fixed number: they are known by the name that the catalog gives to the column's type.
"""


def page() -> str:
    """The whole page."""
    settings = ", ".join(f"`{name}={value}`" for name, value in SESSION_SETTINGS.items())
    declared = "\n".join(_numeric_row(precision, scale) for precision, scale in _DECLARED)
    parts = [_HEAD.format(settings=settings, unread=_unread(), char=CHAR_NOTE)]
    for group, entries in groupby(TYPES, key=lambda entry: entry.group):
        parts.append(f"\n## {group}\n\n{_table(entries)}")
        if group == "Numbers":
            parts.append(_NUMERIC.format(rows=declared))
    return "".join([*parts, _ARRAYS.format(choices=_choices()), "\n", _table(EXTENSIONS)])


def _choices() -> str:
    return "\n".join(
        f"| `{name}: {choice}` | `{kind.spark}` | `{kind.arrow}` | {_HOMELESS[name]} |"
        for (name, choice), kind in CHOICES.items()
    )


def _unread() -> str:
    """The types that are not read in binary form, by their reason."""
    return "\n".join(
        f"- {', '.join(f'`{name}`' for name, why in NOT_READ.items() if why == reason)}: each {reason};"
        for reason in dict.fromkeys(NOT_READ.values())
    )


def _table(entries: Iterable[PgType]) -> str:
    head = "| type | Spark | Arrow | has values without a home | binary | |\n|---|---|---|---|---|---|\n"
    return head + "".join(f"{row}\n" for row in _rows(entries))


def _rows(entries: Iterable[PgType]) -> Iterator[str]:
    for entry in entries:
        kind = entry.becomes
        name = _WRITTEN.get(entry.name, entry.name)
        special = "yes" if kind.special else ""
        binary = "yes" if kind.binary is not None else ""
        yield f"| {name} | `{kind.spark}` | `{kind.arrow}` | {special} | {binary} | {entry.note} |"


def _numeric_row(precision: int, scale: int) -> str:
    kind = BY_OID[NUMERIC_OID].column((precision << 16 | scale & 0x7FF) + 4)
    return f"| numeric({precision},{scale}) | `{kind.spark}` | `{kind.arrow}` |"


if __name__ == "__main__":
    print(page(), end="")
