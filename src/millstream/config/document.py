"""YAML read safely, with the place of every value, and with the environment put in.

`${VAR}` and `${VAR:-default}` expand inside values, after parsing, so that no variable can add
keys; `$${` stands for `${` itself. A plain (unquoted) value gets its type after the expansion:
`${N:-5}` is a number. Whatever is wrong becomes a problem, and reading goes on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from millstream.config.problems import Problem

_VARIABLE = re.compile(r"(?P<escaped>\$\$\{)|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}|\$\{")
_MERGE = "tag:yaml.org,2002:merge"


@dataclass
class Tree:
    """A value of the file with its place. `value` is plain Python all the way down."""

    value: Any
    line: int
    column: int
    children: dict[str | int, Tree] = field(default_factory=dict)
    key_places: dict[str, tuple[int, int]] = field(default_factory=dict)
    written: str | None = None
    """The text as it stands in the file, when it is not the value: it had a variable in it."""

    def at(self, path: Sequence[str | int]) -> Tree:
        """The value at `path`, or the nearest one around it that exists."""
        here = self
        for step in path:
            if step not in here.children:
                break
            here = here.children[step]
        return here

    def place(self, path: Sequence[str | int], *, of_key: bool = False) -> tuple[int, int]:
        """Line and column of the value at `path` (or of its key)."""
        if path and of_key:
            parent = self.at(path[:-1])
            if path[-1] in parent.key_places:
                return parent.key_places[str(path[-1])]
        tree = self.at(path)
        return tree.line, tree.column


def read_document(text: str, file: str, environment: Mapping[str, str]) -> tuple[Tree | None, list[Problem]]:
    """The file's one document, and what is wrong with it as YAML. None when it is no YAML at all."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        return None, [_syntax_problem(file, text, error)]
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        return None, [Problem(file, line, column, "", f"not text: {error.reason}", "remove the character")]
    if node is None:
        hint = "a stream file has the keys name, source, mode and targets"
        return None, [Problem(file, 1, 1, "", "the file is empty", hint)]
    builder = _Builder(loader, file, environment)
    return builder.build(node), builder.problems


def _syntax_problem(file: str, text: str, error: yaml.MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    if "single document" in str(error.context):
        return Problem(file, line, column, "", "more than one document", "put several streams under `streams:`")
    hint = "check indentation, quotes and brackets"
    if "${" in "".join(text.splitlines()[line - 1 : line]):
        hint = "inside [ ] and { } put a value with ${...} in quotes"
    return Problem(file, line, column, "", f"not valid YAML: {error.problem}", hint)


class _Builder:
    def __init__(self, loader: yaml.SafeLoader, file: str, environment: Mapping[str, str]) -> None:
        self.problems: list[Problem] = []
        self._loader = loader
        self._file = file
        self._environment = environment
        self._built: dict[int, Tree] = {}
        self._open: set[int] = set()

    def build(self, node: yaml.Node) -> Tree:
        """Aliases share what was built for their anchor, so the size of the result is the file's."""
        known = self._built.get(id(node))
        if known is not None:
            return known
        tree = Tree(None, node.start_mark.line + 1, node.start_mark.column + 1)
        if id(node) in self._open:
            self._problem(node, "an alias refers to what it stands in")
            return tree
        self._open.add(id(node))
        if isinstance(node, yaml.MappingNode):
            self._mapping(node, tree)
        elif isinstance(node, yaml.SequenceNode):
            tree.children = {index: self.build(child) for index, child in enumerate(node.value)}
            tree.value = [child.value for child in tree.children.values()]
        elif isinstance(node, yaml.ScalarNode):
            self._scalar(node, tree)
        self._open.discard(id(node))
        self._built[id(node)] = tree
        return tree

    def _mapping(self, node: yaml.MappingNode, tree: Tree) -> None:
        merged: dict[str | int, Tree] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                merged = {**self._merged(value_node), **merged}
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(key_node, "a key must be a word")
                continue
            key = str(key_node.value)
            if key in tree.children:
                first = tree.key_places[key][0]
                self._problem(key_node, f"`{key}` is given twice, first on line {first}", "keep one of the two")
                continue
            tree.key_places[key] = (key_node.start_mark.line + 1, key_node.start_mark.column + 1)
            tree.children[key] = self.build(value_node)
        for merged_key, child in merged.items():
            tree.children.setdefault(merged_key, child)
        tree.value = {key: child.value for key, child in tree.children.items()}

    def _merged(self, node: yaml.Node) -> dict[str | int, Tree]:
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str | int, Tree] = {}
        for part in parts:
            if isinstance(part, yaml.MappingNode):
                merged = {**self.build(part).children, **merged}
            else:
                self._problem(part, "only mappings can be merged with `<<`")
        return merged

    def _scalar(self, node: yaml.ScalarNode, tree: Tree) -> None:
        text = self._expand(node)
        tag = node.tag
        if text != node.value:
            tree.written = node.value
            if node.style is None:
                tag = self._loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        try:
            tree.value = self._loader.construct_object(yaml.ScalarNode(tag, text, node.start_mark, node.end_mark))
        except (yaml.YAMLError, ValueError):
            self._problem(node, "not a value that YAML's own types can hold", "put it in quotes to make it text")

    def _expand(self, node: yaml.ScalarNode) -> str:
        def replacement(match: re.Match[str]) -> str:
            if match["escaped"]:
                return "${"
            name, default = match["name"], match["default"]
            if name is None:
                self._problem(
                    node, "`${` does not begin a variable", "write ${NAME}, ${NAME:-default}, or $${ for `${`"
                )
                return match[0]
            value = self._environment.get(name)
            if default is not None:
                return value or default
            if value is None:
                self._problem(node, f"the variable {name} is not set", f"set it, or write ${{{name}:-default}}")
                return match[0]
            return value

        return _VARIABLE.sub(replacement, node.value)

    def _problem(self, node: yaml.Node, message: str, hint: str | None = None) -> None:
        mark = node.start_mark
        self.problems.append(Problem(self._file, mark.line + 1, mark.column + 1, "", message, hint))
