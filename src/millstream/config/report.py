"""Turns what validation finds into problems with places: the part of pydantic that users see."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from millstream.config.document import Tree
from millstream.config.kinds import KEPT
from millstream.config.problems import Problem, Refusal, nearest

Model = TypeVar("Model", bound=BaseModel)

_PLAIN_WORDS = {
    "missing": "is missing",
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "path_type": "must be a path",
    "list_type": "must be a list",
    "dict_type": "must be a mapping of keys to values",
    "model_type": "must be a mapping of keys to values",
    "too_short": "the list is empty",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be {ge} or more",
}


@dataclass
class Reporter:
    """Collects the problems of one file, seen from one value in it (the file's root, or a stream)."""

    file: str
    tree: Tree
    problems: list[Problem]
    warnings: list[Problem]
    prefix: tuple[str | int, ...] = ()

    def under(self, *path: str | int) -> Reporter:
        """The same file, seen from a value further in."""
        return Reporter(self.file, self.tree.at(path), self.problems, self.warnings, (*self.prefix, *path))

    def problem(self, at: Sequence[str | int], message: str, hint: str | None = None, *, of_key: bool = False) -> None:
        self.problems.append(self._made(at, message, hint, of_key))

    def warning(self, at: Sequence[str | int], message: str, hint: str | None = None) -> None:
        self.warnings.append(self._made(at, message, hint, False))

    def refuse_unknown(self, at: Sequence[str | int], given: Mapping[str, Any], known: Sequence[str]) -> None:
        """Report each key that nobody knows, with the nearest one that somebody does."""
        for key in given:
            if key not in known:
                hint = nearest(key, known) or f"known keys: {', '.join(known)}"
                self.problem((*at, key), "unknown key", hint, of_key=True)

    def validate(self, at: Sequence[str | int], model: type[Model], value: object) -> Model | None:
        """The model of `value`, or None after reporting all that is wrong with it."""
        try:
            return model.model_validate(value)
        except ValidationError as wrong:
            for error in wrong.errors(include_url=False, include_input=False):
                self._report(at, model, error["loc"], error["type"], error["msg"], error.get("ctx") or {})
        return None

    def _report(
        self,
        at: Sequence[str | int],
        model: type[BaseModel],
        loc: tuple[str | int, ...],
        kind: str,
        text: str,
        context: Mapping[str, Any],
    ) -> None:
        path = (*at, *loc)
        if kind == "extra_forbidden":
            known = [field.alias or name for name, field in _fields_at(model, loc[:-1]).items()]
            self.refuse_unknown(path[:-1], {str(loc[-1]): None}, known)
            return
        cause = context.get("error")
        if isinstance(cause, Refusal):
            self.problem(path, cause.message, cause.hint)
        elif isinstance(cause, ValueError):
            self.problem(path, str(cause))
        elif kind == "literal_error" and "expected" in context:
            self._not_one_of(path, re.findall(r"'([^']+)'", str(context["expected"])))
        elif kind in _PLAIN_WORDS:
            self.problem(path, _PLAIN_WORDS[kind].format(**context), self._example(path))
        else:
            self.problem(path, text)

    def _not_one_of(self, path: Sequence[str | int], known: Sequence[str]) -> None:
        """A word that is none of those there are."""
        value = self.tree.at(path).value
        available = f"available: {', '.join(known)}"
        if not isinstance(value, str):
            self.problem(path, "must be a word", available)
            return
        meant = nearest(value, known)
        self.problem(path, f"`{value}` is not known", f"{meant} {available}" if meant else available)

    def _example(self, path: Sequence[str | int]) -> str | None:
        """How a key is written, where somebody who left it out would want to know."""
        if not path:
            return None
        if path[-1] == "path" and self.tree.at(path[:-1]).value.get("kind") in KEPT:
            return "write `path: ./copy.db`, a file"
        return _EXAMPLES.get(str(path[-1]))

    def _made(self, at: Sequence[str | int], message: str, hint: str | None, of_key: bool) -> Problem:
        line, column = self.tree.place(at, of_key=of_key)
        tree = self.tree.at(at)
        if tree.written is not None and str(tree.value) and not tree.children:
            # The value came from a variable and may be a secret: show what stands in the file.
            message = message.replace(str(tree.value), tree.written)
        return Problem(self.file, line, column, _dotted((*self.prefix, *at)), message, hint)


_EXAMPLES = {
    "name": "write `name: shop`",
    "source": "write what to capture: source: {kind: postgres, uri: ..., tables: [...]}",
    "kind": "write `kind: ...`",
    "uri": "write `uri: postgresql://user@host:port/database`",
    "tables": "write `tables: [public.orders]`, or `tables: [public.*]`",
    "mode": "write `mode: cdc`",
    "targets": "write where to deliver: targets: [{name: log, kind: files, path: ./log}]",
    "path": "write `path: ./directory`",
}


def _dotted(path: Sequence[str | int]) -> str:
    """`targets[0].batch.max_ms`"""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def _fields_at(model: type[BaseModel], path: Sequence[str | int]) -> Mapping[str, Any]:
    """The fields of the model that is found inside `model` along `path`."""
    for step in path:
        if isinstance(step, str) and step in model.model_fields:
            model = _model_in(model.model_fields[step].annotation) or model
    return model.model_fields


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in get_args(annotation):
        found = _model_in(part)
        if found is not None:
            return found
    return None
