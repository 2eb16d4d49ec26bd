"""Filters and transforms as a stream file writes them: the keys `filter`, `match`, `ops` and `transforms`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from millstream.config.problems import Refusal, nearest
from millstream.transforms.shape import EVERY, MASKED, OPS, Constant, FieldFilter, Shape, SqlFilter, Step, Test, Verb

_TESTS: tuple[Test, ...] = ("equals", "prefix", "regex", "in")


def _filter(value: object) -> object:
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        return {EVERY[0]: value}
    if isinstance(value, dict) and all(isinstance(one, str) and one for one in value.values()):
        return value
    raise Refusal("must be a condition in SQL, or one per table pattern", "write filter: \"status <> 'draft'\"")


def _ops(value: object) -> object:
    if not isinstance(value, list) or not value:
        raise Refusal("must be a list of operations", f"available: {', '.join(OPS)}")
    for one in value:
        if one not in OPS:
            meant = nearest(str(one), OPS)
            raise Refusal(f"`{one}` is no operation", meant or f"available: {', '.join(OPS)}")
    return value


def _words(what: str) -> Callable[[object], object]:
    def check(value: object) -> object:
        words = [value] if isinstance(value, str) else value
        if not isinstance(words, list) or not words or not all(isinstance(one, str) and one for one in words):
            raise Refusal(f"must be a list of {what}")
        return words

    return check


def _pairs(example: str, of: type) -> Callable[[object], object]:
    def check(value: object) -> object:
        right = isinstance(value, dict) and value and all(type(one) is of and one for one in value.values())
        if not right:
            raise Refusal("must be a mapping of columns", f"write {example}")
        return value

    return check


def _mask(value: object) -> object:
    if isinstance(value, str | list):
        words = _words("columns")(value)
        return dict.fromkeys(words, MASKED) if isinstance(words, list) else words
    return _pairs('{mask: [email]}, or {mask: {email: "none"}}', str)(value)


def _constant(value: object) -> object:
    # YAML reads 2024-01-31 as a date.
    return value.isoformat() if isinstance(value, date) else value


def _constants(value: object) -> object:
    return [_constant(one) for one in value] if isinstance(value, list) else value


def _added(value: object) -> object:
    if not isinstance(value, dict) or not value:
        raise Refusal("must be a mapping of new columns", "write {add: {origin: eu, total: {sql: price * amount}}}")
    for name, one in value.items():
        sql = isinstance(one, dict) and list(one) == ["sql"] and isinstance(one["sql"], str)
        if not sql and not isinstance(one, str | int | float | bool | date):
            raise Refusal(f"`{name}` must be a text, number or truth, or {{sql: an expression}}")
    return {name: _constant(one) for name, one in value.items()}


def _salt(value: object) -> object:
    # What stands here may be the salt itself: it is not repeated.
    if not isinstance(value, str) or not value.startswith(("env:", "file:")) or value.endswith(":"):
        raise Refusal("the salt is given by reference", "write salt: env:NAME or file:PATH")
    return value


def _function(value: object) -> object:
    module, colon, name = value.partition(":") if isinstance(value, str) else ("", "", "")
    if not colon or not all(part.isidentifier() for part in module.split(".")) or not name.isidentifier():
        raise Refusal("must be module:function", "write {python: shop.rows:clean}")
    return value


Scalar = Annotated[str | int | float | bool, BeforeValidator(_constant)]
Tables = Annotated[list[str], BeforeValidator(_words("tables"))]


class Keys(BaseModel):
    """Keys of a stream file: no others are known."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class FieldKeys(Keys):
    """A condition on one column; exactly one of the tests."""

    column: str
    equals: Scalar | None = None
    prefix: str | None = None
    regex: str | None = None
    within: Annotated[list[str | int | float | bool], BeforeValidator(_constants), Field(min_length=1)] | None = Field(
        None, alias="in"
    )
    tables: Tables = Field(default_factory=lambda: list(EVERY))

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(one is not None for one in (self.equals, self.prefix, self.regex, self.within)) != 1:
            raise Refusal("needs exactly one test", f"one of {', '.join(_TESTS)}")
        return self

    def made(self) -> FieldFilter:
        if self.within is not None:
            return FieldFilter(self.column, "in", tuple(self.within), tuple(self.tables))
        values: dict[Test, Constant | None] = {"equals": self.equals, "prefix": self.prefix, "regex": self.regex}
        ((test, value),) = [(test, value) for test, value in values.items() if value is not None]
        return FieldFilter(self.column, test, (value,), tuple(self.tables))


class HashKeys(Keys):
    """Columns to hash, and where the salt is."""

    columns: Annotated[list[str], BeforeValidator(_words("columns"))]
    salt: Annotated[str, BeforeValidator(_salt)]


class TransformKeys(Keys):
    """One transform; exactly one of the verbs."""

    drop: Annotated[list[str], BeforeValidator(_words("columns"))] | None = None
    rename: Annotated[dict[str, str], BeforeValidator(_pairs("{rename: {old: new}}", str))] | None = None
    cast: Annotated[dict[str, str], BeforeValidator(_pairs("{cast: {total: string}}", str))] | None = None
    add: Annotated[dict[str, Any], BeforeValidator(_added)] | None = None
    mask: Annotated[dict[str, str], BeforeValidator(_mask)] | None = None
    hash: HashKeys | None = None
    truncate: Annotated[dict[str, int], BeforeValidator(_pairs("{truncate: {note: 100}}", int))] | None = None
    select: Annotated[list[str], BeforeValidator(_words("expressions"))] | None = None
    python: Annotated[str, BeforeValidator(_function)] | None = None
    tables: Tables = Field(default_factory=lambda: list(EVERY))

    @model_validator(mode="after")
    def _one(self) -> Self:
        verbs = [name for name in type(self).model_fields if name != "tables"]
        if sum(getattr(self, name) is not None for name in verbs) != 1:
            raise Refusal("needs exactly one transform", f"one of {', '.join(verbs)}")
        return self

    def made(self, absolute: Callable[[str], str]) -> list[Step]:
        """The transform, as one step or two. `absolute` makes references to secrets independent of the file."""
        tables = tuple(self.tables)
        if self.hash is not None:
            salt = absolute(self.hash.salt)
            return [Step("hash", tuple((name, salt) for name in self.hash.columns), tables)]
        if self.add is not None:
            return _adding(self.add, tables)
        lists: dict[Verb, list[str] | None] = {
            "drop": self.drop,
            "select": self.select,
            "python": [self.python] if self.python else None,
        }
        maps: dict[Verb, Mapping[str, Any] | None] = {
            "rename": self.rename,
            "cast": self.cast,
            "mask": self.mask,
            "truncate": self.truncate,
        }
        named = {verb: tuple((name, None) for name in names) for verb, names in lists.items() if names is not None}
        paired = {verb: tuple(pairs.items()) for verb, pairs in maps.items() if pairs is not None}
        ((verb, arguments),) = {**named, **paired}.items()
        return [Step(verb, arguments, tables)]


def _adding(values: Mapping[str, Any], tables: tuple[str, ...]) -> list[Step]:
    """Constants and expressions, in runs of the same kind, so that columns keep their order."""
    steps: list[Step] = []
    for name, value in values.items():
        verb: Verb = "add_sql" if isinstance(value, dict) else "add"
        argument = (name, value["sql"] if isinstance(value, dict) else value)
        if steps and steps[-1].verb == verb:
            steps[-1] = Step(verb, (*steps[-1].arguments, argument), tables)
        else:
            steps.append(Step(verb, (argument,), tables))
    return steps


class ShapeKeys(Keys):
    """The keys of a stream that say what becomes of its rows."""

    filter: Annotated[dict[str, str], BeforeValidator(_filter)] = Field(default_factory=dict)
    match: list[FieldKeys] = Field(default_factory=list)
    ops: Annotated[list[str], BeforeValidator(_ops)] = Field(default_factory=lambda: list(OPS))
    transforms: list[TransformKeys] = Field(default_factory=list)


def made(keys: ShapeKeys, absolute: Callable[[str], str]) -> Shape:
    """The shape that the keys describe."""
    return Shape(
        tuple(SqlFilter(condition, (pattern,)) for pattern, condition in keys.filter.items()),
        tuple(one.made() for one in keys.match),
        tuple(name for name in OPS if name in keys.ops),
        tuple(step for one in keys.transforms for step in one.made(absolute)),
    )
