"""Text search: tsvector and tsquery. Their values are lists and trees of any shape, so each is written alone."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from millstream.sources.postgres.binary.cells import Values, refuse
from millstream.sources.postgres.casts import NONE, Casted, Reader
from millstream.sources.postgres.cells import strings

_VALUE, _OPERATOR = 1, 2
_NOT, _AND, _OR, _PHRASE = 1, 2, 3, 4
_BINDS = {_OR: 1, _AND: 2, _PHRASE: 3, _NOT: 4}
"""How strongly: what binds less than the operator around it stands in parentheses."""
_NEVER = 5
"""A word never needs them."""


@dataclass(frozen=True)
class Written:
    """Reads a type by a function that writes the text of one value."""

    write: Callable[[bytes], str]
    what: str

    def __call__(self, cells: pa.Array, to: pa.DataType) -> Casted:
        values = Values(cells)
        pairs = zip(values.first.tolist(), values.last.tolist(), strict=True)
        try:
            texts = [self.write(values.data[first:last].tobytes()) for first, last in pairs]
        except (ValueError, IndexError, struct.error):
            refuse(self.what)
        return values.spread(strings(texts)), NONE


def tsvector(raw: bytes) -> str:
    """How many lexemes; of each its letters up to a zero byte, how many places, and the places with their
    weight in the two highest bits. `'a':1A,2 'b c'`."""
    (count,) = struct.unpack_from(">I", raw)
    at, lexemes = 4, []
    for _ in range(count):
        end = raw.index(b"\0", at)
        (places,) = struct.unpack_from(">H", raw, end + 1)
        listed = ",".join(
            f"{place & 0x3FFF}{('', 'C', 'B', 'A')[place >> 14]}"
            for place in struct.unpack_from(f">{places}H", raw, end + 3)
        )
        lexemes.append(_quoted(raw[at:end]) + (f":{listed}" if places else ""))
        at = end + 3 + 2 * places
    if at != len(raw):
        raise ValueError("bytes are left over")
    return " ".join(lexemes)


@dataclass(frozen=True)
class _Part:
    """A part of a query as text, what its outermost operator is (0: a word), and how strongly that binds."""

    text: str
    operator: int = 0
    binds: int = _NEVER

    def within(self, binds: int, *, ordered: bool = False) -> str:
        """As it stands inside an operator that binds so strongly. `ordered`: right of a phrase, which
        must not be read from the left."""
        if self.binds < binds or (ordered and self.operator == _PHRASE):
            return f"( {self.text} )"
        return self.text


def tsquery(raw: bytes) -> str:
    """The tree, operators before what they join, the right side first. `'a' & !'b':*A | 'c' <2> 'd'`."""
    nodes = _nodes(raw)
    parts: list[_Part] = []
    for node in reversed(nodes):
        if isinstance(node, str):
            parts.append(_Part(node))
            continue
        operator, distance = node
        binds = _BINDS[operator]
        right = parts.pop()
        if operator == _NOT:
            parts.append(_Part("!" + right.within(binds), operator, binds))
            continue
        sign = {_AND: "&", _OR: "|"}.get(operator) or ("<->" if distance == 1 else f"<{distance}>")
        text = f"{parts.pop().within(binds)} {sign} {right.within(binds, ordered=operator == _PHRASE)}"
        parts.append(_Part(text, operator, binds))
    if len(parts) != min(1, len(nodes)):
        raise ValueError("not one tree")
    return parts[0].text if parts else ""


def _nodes(raw: bytes) -> list[str | tuple[int, int]]:
    """Words as they are written, and operators with their distance."""
    (count,) = struct.unpack_from(">I", raw)
    at = 4
    nodes: list[str | tuple[int, int]] = []
    for _ in range(count):
        if raw[at] == _VALUE:
            weights, prefix = raw[at + 1], raw[at + 2]
            end = raw.index(b"\0", at + 3)
            marks = ("*" if prefix else "") + "".join(
                letter for bit, letter in ((8, "A"), (4, "B"), (2, "C"), (1, "D")) if weights & bit
            )
            nodes.append(_quoted(raw[at + 3 : end]) + (f":{marks}" if weights or prefix else ""))
            at = end + 1
            continue
        operator = raw[at + 1]
        if raw[at] != _OPERATOR or operator not in _BINDS:
            raise ValueError("neither a word nor an operator")
        distance = struct.unpack_from(">h", raw, at + 2)[0] if operator == _PHRASE else 0
        nodes.append((operator, distance))
        at += 4 if operator == _PHRASE else 2
    if at != len(raw):
        raise ValueError("bytes are left over")
    return nodes


def _quoted(lexeme: bytes) -> str:
    text = lexeme.decode().replace("\\", "\\\\").replace("'", "''")
    return f"'{text}'"


READERS: dict[str, Reader] = {
    "tsvector": Written(tsvector, "tsvector"),
    "tsquery": Written(tsquery, "tsquery"),
}
