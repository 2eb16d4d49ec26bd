"""Which Arrow and Spark type a Postgres column has: the one table, for stream and snapshot alike.

Each built-in type has one entry in `TYPES`: its names and OIDs, what a column of it becomes, and
the readers that make columns of the server's text and of its binary form (`binary.READERS`, by the
type's name; why a type has none there, `wire.NOT_READ` says). `docs/types/postgres.md` is made from
this table. `CHOICES` has what a source can be asked to make of some types instead.

A value without a home in its column's type (NaN in a decimal, infinity in a timestamp, a year
beyond 9999, an array of two dimensions) is NULL in the column and stands with its exact text in
`_ms_special`. A key column must never be NULL like that, so a key column whose type has such
values is text. A type this table does not know, or cannot see through (a domain whose base the
catalog no longer told), arrives as its exact text.

A database with the encoding SQL_ASCII takes any bytes for text. So what is text of its users there
(not what is always ASCII, like a uuid or an interval) becomes binary columns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import pyarrow as pa

from millstream.errors import JournalCorrupt
from millstream.model import Column, Relation
from millstream.sources.postgres import binary, casts, clocks
from millstream.sources.postgres.arrays import ListReader
from millstream.sources.postgres.casts import Casted, Reader
from millstream.sources.postgres.cells import Ints, integers

Choices = tuple[tuple[str, str], ...]
"""Pairs of a type and a choice, as `Relation.types` has them."""


@dataclass(frozen=True)
class ColumnType:
    """What a column becomes, and the readers of its values.

    `special` says that the type has values that the column cannot hold. A reader is given the Arrow
    type it must make; `binary` is None for a type whose binary form we do not read.
    """

    arrow: pa.DataType
    spark: str
    text: Reader = casts.text
    special: bool = False
    binary: Reader | None = None
    ascii: bool = False
    """Whether its text is ASCII in any database, whatever the encoding."""

    def read(self, cells: pa.Array) -> Casted:
        """The server's text as a column, and the rows that have no home in it."""
        return self.text(cells, self.arrow)

    def read_binary(self, cells: pa.Array) -> Casted:
        """The same of values in the server's binary form. Raises JournalCorrupt if that cannot be read."""
        if self.binary is None:
            raise JournalCorrupt(
                "a value is in a binary form that this version cannot read",
                hint="use the version of millstream that wrote the journal, or a newer one",
            )
        return self.binary(cells, self.arrow)

    def binary_text(self, cells: pa.Array, rows: Ints) -> pa.StringArray:
        """The text that the server would have sent for these rows of values in binary form."""
        return replace(self, arrow=pa.string()).read_binary(cells.take(integers(rows)))[0]

    def as_text(self) -> ColumnType:
        """The same type where only its text will do."""
        return replace(self, arrow=pa.string(), spark="string", text=casts.text, special=False)

    def as_bytes(self) -> ColumnType:
        """The same type in a database that knows no encoding: what was text may be any bytes."""
        if self.ascii:
            return self
        if pa.types.is_string(self.arrow):
            return replace(self, arrow=pa.binary(), spark="binary")
        if self.arrow == pa.list_(pa.string()):
            return replace(self, arrow=pa.list_(pa.binary()), spark="array<binary>")
        return self


@dataclass(frozen=True)
class PgType:
    """One type of Postgres. `array` is the OID of its array type (0: there is none)."""

    group: str
    oid: int
    array: int
    name: str
    """As `pg_type.typname` has it."""
    becomes: ColumnType
    """For numeric, whose columns differ, the case where nothing is declared."""
    note: str = ""
    delimiter: str = ","
    """What stands between elements in the text of its arrays."""

    def column(self, modifier: int = -1, choices: Choices = ()) -> ColumnType:
        """What a column of this type, declared with this modifier, becomes under these choices."""
        for name, choice in choices:
            if name == self.name:
                return _chosen(name, choice)
        return _numeric(modifier) if self.oid == NUMERIC_OID else self.becomes


TEXT = ColumnType(pa.string(), "string")

BOOL_OID, BYTEA_OID, TEXT_OID, NUMERIC_OID = 16, 17, 25, 1700

_MAX_DECIMAL = 38


def _type(
    group: str, oid: int, array: int, name: str, arrow: pa.DataType, text: casts.Reader, *, special: bool = False
) -> PgType:
    ascii = group in _ASCII_GROUPS or name in _ASCII_NAMES
    becomes = ColumnType(arrow, _spark(arrow), text, special, binary.READERS.get(name), ascii)
    return PgType(group, oid, array, name, becomes)


def _texts(group: str, *types: tuple[int, int, str]) -> list[PgType]:
    return [_type(group, *each, pa.string(), casts.text) for each in types]


def _noted(entry: PgType, note: str, delimiter: str = ",") -> PgType:
    return replace(entry, note=note, delimiter=delimiter)


def _spark(arrow: pa.DataType) -> str:
    """The Spark type that an Arrow type is read as, as DDL."""
    if pa.types.is_list(arrow):
        return f"array<{_spark(arrow.value_type)}>"
    if pa.types.is_decimal(arrow):
        return f"decimal({arrow.precision},{arrow.scale})"
    return _SPARK[str(arrow)]


_SPARK = {
    "bool": "boolean",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "float": "float",
    "double": "double",
    "string": "string",
    "binary": "binary",
    "date32[day]": "date",
    "timestamp[us]": "timestamp_ntz",
    "timestamp[us, tz=UTC]": "timestamp",
}

_ASCII_GROUPS = {"Numbers", "Bytes and bits", "Dates and times", "Network", "Geometry", "Ranges"}
_ASCII_NAMES = {"uuid", "tid", "pg_lsn", "pg_snapshot", "txid_snapshot"}

_FAR = "infinity, -infinity, BC and years beyond 9999"
_REG = "the object's name, with its schema unless that is pg_catalog; the number of an object that is gone"

TYPES: tuple[PgType, ...] = (
    _type("Numbers", BOOL_OID, 1000, "bool", pa.bool_(), casts.boolean),
    _type("Numbers", 21, 1005, "int2", pa.int16(), casts.parsed),
    _type("Numbers", 23, 1007, "int4", pa.int32(), casts.parsed),
    _type("Numbers", 20, 1016, "int8", pa.int64(), casts.parsed),
    _noted(_type("Numbers", 700, 1021, "float4", pa.float32(), casts.parsed), "NaN and infinities are values of it"),
    _noted(_type("Numbers", 701, 1022, "float8", pa.float64(), casts.parsed), "NaN and infinities are values of it"),
    _noted(
        _type("Numbers", NUMERIC_OID, 1231, "numeric", pa.string(), casts.text),
        "nothing declared: exact text, NaN and infinities included; numeric(p,s): see below",
    ),
    _noted(
        _type("Numbers", 790, 791, "money", pa.decimal128(19, 2), casts.money),
        "the session's lc_monetary is C, so two places always",
    ),
    *_texts("Text", (25, 1009, "text"), (1043, 1015, "varchar")),
    *(_noted(t, "padded with blanks, as the server sends it") for t in _texts("Text", (1042, 1014, "bpchar"))),
    *_texts("Text", (19, 1003, "name"), (18, 1002, "char"), (2950, 2951, "uuid")),
    _type("Bytes and bits", BYTEA_OID, 1001, "bytea", pa.binary(), casts.bytea),
    *(_noted(t, "a string of 0 and 1") for t in _texts("Bytes and bits", (1560, 1561, "bit"), (1562, 1563, "varbit"))),
    _noted(_type("Dates and times", 1082, 1182, "date", pa.date32(), casts.parsed, special=True), _FAR),
    _noted(_type("Dates and times", 1114, 1115, "timestamp", pa.timestamp("us"), casts.parsed, special=True), _FAR),
    _noted(
        _type("Dates and times", 1184, 1185, "timestamptz", pa.timestamp("us", "UTC"), casts.parsed, special=True),
        _FAR,
    ),
    *(_noted(t, "24:00:00 is a value of it") for t in _texts("Dates and times", (1083, 1183, "time"))),
    *(_noted(t, "with the offset it was written with") for t in _texts("Dates and times", (1266, 1270, "timetz"))),
    *(
        _noted(t, "in the style postgres: 1 mon -3 days 04:05:06")
        for t in _texts("Dates and times", (1186, 1187, "interval"))
    ),
    *_texts("Documents", (114, 199, "json"), (3802, 3807, "jsonb"), (142, 143, "xml"), (4072, 4073, "jsonpath")),
    *_texts("Text search", (3614, 3643, "tsvector"), (3615, 3645, "tsquery"), (3642, 3644, "gtsvector")),
    *_texts("Network", (869, 1041, "inet"), (650, 651, "cidr"), (829, 1040, "macaddr"), (774, 775, "macaddr8")),
    *_texts("Geometry", (600, 1017, "point"), (628, 629, "line"), (601, 1018, "lseg"), (602, 1019, "path")),
    *(_noted(t, "in arrays divided by ;", ";") for t in _texts("Geometry", (603, 1020, "box"))),
    *_texts("Geometry", (604, 1027, "polygon"), (718, 719, "circle")),
    *_texts("Ranges", (3904, 3905, "int4range"), (3926, 3927, "int8range"), (3906, 3907, "numrange")),
    *_texts("Ranges", (3908, 3909, "tsrange"), (3910, 3911, "tstzrange"), (3912, 3913, "daterange")),
    *_texts("Ranges", (4451, 6150, "int4multirange"), (4536, 6157, "int8multirange"), (4532, 6151, "nummultirange")),
    *_texts("Ranges", (4533, 6152, "tsmultirange"), (4534, 6153, "tstzmultirange"), (4535, 6155, "datemultirange")),
    _type("Object identifiers", 26, 1028, "oid", pa.int64(), casts.parsed),
    _type("Object identifiers", 28, 1011, "xid", pa.int64(), casts.parsed),
    _type("Object identifiers", 29, 1012, "cid", pa.int64(), casts.parsed),
    _type("Object identifiers", 5069, 271, "xid8", pa.decimal128(20, 0), casts.parsed),
    *_texts("Object identifiers", (27, 1010, "tid"), (3220, 3221, "pg_lsn"), (5038, 5039, "pg_snapshot")),
    *_texts("Object identifiers", (2970, 2949, "txid_snapshot")),
    *(
        _noted(t, _REG)
        for t in _texts(
            "Object identifiers",
            (2205, 2210, "regclass"),
            (2206, 2211, "regtype"),
            (24, 1008, "regproc"),
            (2202, 2207, "regprocedure"),
            (2203, 2208, "regoper"),
            (2204, 2209, "regoperator"),
            (3734, 3735, "regconfig"),
            (3769, 3770, "regdictionary"),
            (4089, 4090, "regnamespace"),
            (4096, 4097, "regrole"),
            (4191, 4192, "regcollation"),
        )
    ),
    *_texts("Of the server itself", (1033, 1034, "aclitem"), (1790, 2201, "refcursor"), (194, 0, "pg_node_tree")),
    *(
        _noted(t, "numbers with blanks between them")
        for t in _texts("Of the server itself", (22, 1006, "int2vector"), (30, 1013, "oidvector"))
    ),
    *_texts("Of the server itself", (3361, 0, "pg_ndistinct"), (3402, 0, "pg_dependencies"), (5017, 0, "pg_mcv_list")),
    *_texts("Of the server itself", (4600, 0, "pg_brin_bloom_summary"), (4601, 0, "pg_brin_minmax_multi_summary")),
)
"""Every base, range and multirange type of pg_catalog; tests compare it with live servers."""

_BRACKETS = ListReader(casts.parsed, ",", "[", "]")

EXTENSIONS: tuple[PgType, ...] = (
    PgType("Extensions", 0, 0, "vector", ColumnType(pa.list_(pa.float32()), "array<float>", _BRACKETS, special=True)),
    PgType("Extensions", 0, 0, "halfvec", ColumnType(pa.list_(pa.float32()), "array<float>", _BRACKETS, special=True)),
    *_texts("Extensions", (0, 0, "sparsevec"), (0, 0, "hstore"), (0, 0, "ltree"), (0, 0, "lquery")),
    *_texts("Extensions", (0, 0, "ltxtquery"), (0, 0, "citext")),
)
"""Types without a fixed OID: known by the name that the catalog gave to the column's type, else text."""

CHOICES: Mapping[tuple[str, str], ColumnType] = {
    ("time", "time"): ColumnType(
        pa.time64("us"), "time(6)", clocks.time, special=True, binary=binary.READERS["time"], ascii=True
    ),
    ("timetz", "struct"): ColumnType(
        clocks.TIMETZ,
        "struct<microseconds:bigint,offset_seconds:int>",
        clocks.timetz,
        special=True,
        binary=binary.READERS["timetz"],
        ascii=True,
    ),
    ("interval", "struct"): ColumnType(
        clocks.INTERVAL,
        "struct<months:int,days:int,microseconds:bigint>",
        clocks.interval,
        special=True,
        binary=binary.READERS["interval"],
        ascii=True,
    ),
}
"""What a source may be asked to make of a type instead (`types` of its options), by the type's name and the choice.
A struct is no key, which `special` says too."""

BY_OID = {entry.oid: entry for entry in TYPES}
BY_ARRAY_OID = {entry.array: entry for entry in TYPES if entry.array}
_BY_NAME = {entry.name: entry for entry in EXTENSIONS}

_BARE_NAME = re.compile(r'(?:^|\.)"?(\w+)"?(?:\(\d+\))?$')


def column_type(column: Column, *, key: bool = False, choices: Choices = ()) -> ColumnType:
    """The type of one column; `key` says that the column identifies rows and so may never be NULL."""
    found = _column_type(column, choices)
    return found.as_text() if key and found.special else found


def column_types(relation: Relation) -> tuple[ColumnType, ...]:
    """The types of all columns of a relation, in its order.

    Where whole rows are the identity (FULL without a primary key) no column is a key of its own.
    """
    keys = set(relation.key)
    if relation.identity == "f" and not relation.primary_key:
        keys = set()
    types = tuple(column_type(column, key=column.name in keys, choices=relation.types) for column in relation.columns)
    return types if relation.encoding == "UTF8" else tuple(each.as_bytes() for each in types)


@cache
def array_of(element: ColumnType, delimiter: str = ",") -> ColumnType:
    """The type of arrays with such elements: a list of them, where the array is one (see `arrays`)."""
    return ColumnType(
        pa.list_(element.arrow),
        f"array<{element.spark}>",
        ListReader(element.text, delimiter),
        special=True,
        binary=None if element.binary is None else binary.ArrayReader(element.binary, delimiter),
        ascii=element.ascii,
    )


def _column_type(column: Column, choices: Choices) -> ColumnType:
    oid, modifier = column.type_oid, column.type_mod
    if column.type_kind == "d":
        if column.base_type_oid is None:
            return TEXT
        oid, modifier = column.base_type_oid, -1 if column.base_type_mod is None else column.base_type_mod
    if oid in BY_OID:
        return BY_OID[oid].column(modifier, choices)
    if oid in BY_ARRAY_OID:
        element = BY_ARRAY_OID[oid]
        return array_of(element.column(modifier, choices), element.delimiter)
    if column.element_type_oid is not None and column.element_delimiter is not None:
        return array_of(TEXT, column.element_delimiter)
    return _extension(column) if column.type_kind == "b" else TEXT


def _chosen(name: str, choice: str) -> ColumnType:
    if (name, choice) not in CHOICES:
        raise JournalCorrupt(
            f"columns of type {name} are to be {choice}, which this version does not know",
            hint="use the version of millstream that wrote the journal, or a newer one",
        )
    return CHOICES[name, choice]


def _extension(column: Column) -> ColumnType:
    name = _BARE_NAME.search(column.type_name or "")
    return _BY_NAME[name[1]].becomes if name and name[1] in _BY_NAME else TEXT


def _numeric(modifier: int) -> ColumnType:
    """Decimal where precision and scale are declared and Spark can hold them, else text."""
    free = BY_OID[NUMERIC_OID].becomes
    if modifier < 4:
        return free
    precision = (modifier - 4) >> 16 & 0xFFFF
    # An 11-bit signed number since Postgres 15, which allows a negative scale.
    scale = ((modifier - 4 & 0x7FF) ^ 0x400) - 0x400
    if scale < 0:
        precision, scale = precision - scale, 0
    if not scale <= precision <= _MAX_DECIMAL:
        return free
    arrow = pa.decimal128(precision, scale)
    return replace(free, arrow=arrow, spark=_spark(arrow), text=casts.parsed, special=True)
