"""The options of a Postgres source, declared once: names, defaults, checks and documentation.

They stand in the stream file beside `kind`, `uri` and `tables`. Values that come from elsewhere
(names of slot and publication) are completed by `PostgresOptions.of`.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from millstream.config.units import parse_duration_ms, parse_size
from millstream.errors import ConfigError
from millstream.model import SourceSpec

PREFIX = "millstream_"
"""How the name of a slot begins that was not chosen by a person."""
INSERT_SUFFIX = "_insert"
"""What the name of the insert-only publication has more than that of the main one."""

_NAME_BYTES = 63 - len(INSERT_SUFFIX)

Duration = Annotated[int, BeforeValidator(parse_duration_ms)]
"""Milliseconds; written as `10s`, `500ms`, `1m`."""


Size = Annotated[int, BeforeValidator(parse_size)]
"""Bytes; written as `64MiB`, `1GiB`."""


class _Keys(BaseModel):
    """Keys of which the unknown are refused, with the nearest known one named."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="wrap")
    @classmethod
    def _suggest(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Unknown keys keep their place among the other errors."""
        try:
            return handler(value)
        except ValidationError as wrong:
            raise ValidationError.from_exception_data(
                wrong.title, [_with_suggestion(error, list(cls.model_fields)) for error in wrong.errors()]
            ) from None


class TypeChoices(_Keys):
    """What columns of some types become, where there is a choice. See `types.CHOICES`."""

    time: Literal["string", "time"] = Field(
        default="string", description="`time`: Spark's TIME. `24:00:00` has no home there."
    )
    timetz: Literal["string", "struct"] = Field(
        default="string", description="`struct`: microseconds of the day, and seconds ahead of UTC."
    )
    interval: Literal["string", "struct"] = Field(
        default="string", description="`struct`: months, days and microseconds, as Postgres keeps them."
    )

    @property
    def chosen(self) -> tuple[tuple[str, str], ...]:
        """The choices that are not the usual, as `Relation.types` has them."""
        return tuple(sorted((name, choice) for name, choice in self.model_dump().items() if choice != "string"))


class PostgresOptions(_Keys):
    """What a Postgres source can be told, beyond the keys that all sources have."""

    slot: str = Field(
        "",
        pattern=r"^[a-z0-9_]{1,56}$",
        validate_default=False,
        description="Name of the replication slot. Default: millstream_ and the source's name.",
    )
    publication: str = Field(
        "",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,55}$",
        validate_default=False,
        description="Name of the publication; the insert-only one beside it has the suffix _insert. "
        "Default: the slot's name.",
    )
    heartbeat_interval: Duration = Field(
        10_000,
        description="How often a small logical message is written to the source, so that the slot moves on in a "
        "quiet database. 0 turns it off.",
    )
    status_interval: Duration = Field(
        10_000,
        ge=100,
        description="How often the server hears from us, at least. Keep it well below the server's wal_sender_timeout.",
    )
    watch_interval: Duration = Field(
        60_000,
        ge=100,
        description="How often the catalog is looked at: for what becomes of publications, and for what happens to "
        "tables and partitions without a word in the log.",
    )
    connect_timeout: Duration = Field(
        10_000, ge=1000, description="How long one attempt to connect may take; whole seconds."
    )
    push: bool = Field(
        False, description="Let the server leave out columns and rows (`columns`, `rows`), instead of Millstream."
    )
    columns: dict[str, Annotated[list[str], Field(min_length=1)]] = Field(
        default_factory=dict,
        description="Per table (schema.table) the columns that the server sends. Needs `push: true` and Postgres 15.",
    )
    rows: dict[str, Annotated[str, Field(min_length=1)]] = Field(
        default_factory=dict,
        description="Per table (schema.table) an SQL condition; the server sends rows that meet it. Needs "
        "`push: true` and Postgres 15.",
    )
    origin: Literal["any", "none"] = Field(
        "any", description="`none` leaves out changes that were themselves replicated to the source. Needs Postgres 16."
    )
    messages: bool = Field(True, description="Whether logical messages (pg_logical_emit_message) are captured.")
    ddl_trigger: bool = Field(
        False,
        description="Install event triggers on the source that write what commands do to tables (ALTER, CREATE, DROP, "
        "rewrites, partitions) into the log, where it happens: then a capture that is behind knows it as well as one "
        "that is not. Needs a superuser.",
    )
    catch_up: Literal["auto", "streaming"] = Field(
        "auto",
        description="`auto` reads the log in bulk, through a temporary copy of the slot, while capture is far behind. "
        "`streaming` never does.",
    )
    catch_up_behind: Size = Field(
        64 << 20,
        ge=64 << 10,
        description="How far the journal must be behind the end of the source's log for bulk reading to begin; it "
        "ends at a quarter of that.",
    )
    catch_up_sessions: int = Field(
        2,
        ge=1,
        le=16,
        description="How many sessions read in bulk at the same time, at most. Each decodes another stretch of the "
        "log, in a process of its own on the source, through a temporary slot of its own.",
    )
    snapshot_wait: Duration = Field(
        10 * 60_000,
        gt=0,
        description="How long a snapshot waits for transactions that are open on the source before it gives up.",
    )
    max_connections: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="How many sessions read tables at once, at most, while tables are copied or compared. Default: as "
        "many as Spark runs tasks.",
    )
    max_rate: Annotated[int, BeforeValidator(parse_size), Field(ge=64 << 10)] | None = Field(
        None, description="How many bytes a second are read, at most, by all of these sessions together: `20MiB`."
    )
    max_snapshot_age: Annotated[int, BeforeValidator(parse_duration_ms), Field(gt=0)] | None = Field(
        None,
        description="How long a snapshot of the source is held, at most. What is left then is read under another one.",
    )
    snapshot_at_once: Size = Field(
        4 << 30,
        description="Up to so much a new mirror gets all tables at one moment. Beyond it they come in ranges of their "
        "keys, beside the changes, and a copy that is interrupted goes on with the ranges that are left.",
    )
    wire: Literal["text", "binary"] = Field(
        "text",
        description="How values travel. `binary` is for tables of built-in base types and their arrays only, and gives "
        "the same columns.",
    )
    types: TypeChoices = Field(
        TypeChoices(), description="What columns of the types time, timetz and interval become, if not text."
    )
    protocol: Literal[1, 2, 3, 4] = Field(
        1,
        description="Version of pgoutput's protocol. From 2 on (Postgres 14; 3 needs 15, 4 needs 16) the server sends "
        "large transactions while they are open, and Millstream keeps them on its own disk until they commit.",
    )
    failover: bool = Field(
        False, description="Create the slot so that it is synchronised to standbys. Needs Postgres 17."
    )

    @classmethod
    def of(cls, source: SourceSpec) -> PostgresOptions:
        """The options of a source, with every default filled in. Raises ConfigError with all problems."""
        try:
            given = cls.model_validate(dict(source.options))
        except ValidationError as wrong:
            problems = "; ".join(
                f"{'.'.join(str(part) for part in error['loc']) or 'options'}: {error['msg']}"
                for error in wrong.errors(include_input=False, include_url=False)
            )
            raise ConfigError(f"source {source.name}: {problems}") from None
        slot = given.slot or default_name(source.name)
        return given.model_copy(update={"slot": slot, "publication": given.publication or slot})

    @property
    def insert_publication(self) -> str:
        """The publication of the tables whose updates and deletes cannot be published."""
        return self.publication + INSERT_SUFFIX

    @property
    def publications(self) -> tuple[str, str]:
        """Both publications, the main one first. Both always exist, so their names never change."""
        return self.publication, self.insert_publication

    def plugin_options(self, server_version: int) -> dict[str, str]:
        """What pgoutput is told when it is read in bulk. `server_version` as libpq counts it: 160010."""
        chosen = {
            "proto_version": "1",
            "publication_names": ",".join(f'"{name}"' for name in self.publications),
            "messages": "true" if self.messages else "false",
        }
        if server_version >= 160000:
            chosen["origin"] = self.origin
        if self.wire == "binary":
            chosen["binary"] = "true"
        return chosen

    def stream_options(self, server_version: int) -> dict[str, str]:
        """The same for a stream: the rows that come of it are those of protocol 1, whatever the protocol."""
        chosen = self.plugin_options(server_version)
        if self.protocol > 1:
            chosen |= {"proto_version": str(self.protocol), "streaming": "parallel" if self.protocol > 3 else "on"}
        return chosen

    @model_validator(mode="after")
    def _hear_the_trigger(self) -> Self:
        if self.ddl_trigger and not self.messages:
            raise PydanticCustomError(
                "messages_needed", "ddl_trigger writes logical messages: leave messages out, or set it to true"
            )
        return self

    @model_validator(mode="after")
    def _ask_before_pushing(self) -> Self:
        if (self.columns or self.rows) and not self.push:
            raise PydanticCustomError(
                "push_needed",
                "columns and rows make the server leave data out, which the journal then never has: "
                "add push: true to ask for it",
            )
        return self


def newest_protocol(server_version: int) -> int:
    """The newest version of pgoutput's protocol that a server has."""
    return 4 if server_version >= 160000 else 3 if server_version >= 150000 else 2


def default_name(source: str) -> str:
    """`millstream_` and the source's name in the letters a slot may have.

    A name that had to be changed or cut gets a piece of its hash, so that two sources never share a slot.
    """
    plain = re.sub(r"[^a-z0-9_]", "_", source.lower())
    name = f"{PREFIX}{plain}"
    if plain == source and len(name) <= _NAME_BYTES:
        return name
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    return f"{name[: _NAME_BYTES - 9]}_{digest}"


def _with_suggestion(error: Any, known: list[str]) -> InitErrorDetails:
    text = str(error["msg"])
    if error["type"] == "extra_forbidden" and len(error["loc"]) == 1:
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        text = "unknown key" + (f", did you mean {near[0]}?" if near else f"; known keys: {', '.join(known)}")
    elif error["type"] == "literal_error" and "expected" in error["ctx"]:
        text = f"must be {error['ctx']['expected']}"
    elif error["type"] == "string_pattern_mismatch":
        text = "must be a name of at most 56 letters, digits and underscores (for a slot: lower case)"
    # The text goes in as a value: as a template, braces in it would be read as names.
    kind = PydanticCustomError(error["type"], "{text}", {"text": text.removeprefix("Value error, ")})
    return InitErrorDetails(type=kind, loc=error["loc"], input=error["input"])
