"""Which tables a stream means: `schema.table`, `schema.*`, `public.item_*`, `*.*`, `"My Schema"."T"`.

Names are compared as the catalog has them: nothing is folded to lower case. `*` stands for any run
of characters and `?` for one; inside double quotes every character is itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from millstream.errors import ConfigError

_PART = r'"(?:[^"]|"")+"|[^".\s][^".]*'
_PATTERN = re.compile(rf"({_PART})\.({_PART})")


@dataclass(frozen=True)
class Pattern:
    """A table pattern. `schema` and `name` are patterns of SQL's LIKE, with backslash as escape."""

    text: str
    schema: str
    name: str
    literal: bool
    """True when it can mean one table only, so that its absence is an error."""

    def matches(self, schema: str, name: str) -> bool:
        """The same answer as the server gives for `schema LIKE ... AND name LIKE ...`."""
        return all(
            re.fullmatch(_like_to_regex(like), text, re.DOTALL) is not None
            for like, text in ((self.schema, schema), (self.name, name))
        )


def parse_patterns(patterns: Sequence[str]) -> list[Pattern]:
    """Raises ConfigError that lists every pattern that is none."""
    parsed = {text: _PATTERN.fullmatch(text.strip()) for text in patterns}
    wrong = [text for text, match in parsed.items() if match is None]
    if wrong or not parsed:
        said = f"not a table pattern: {', '.join(repr(text) for text in wrong)}" if wrong else "no tables are named"
        raise ConfigError(said, hint='write schema.table, schema.*, public.item_* or "My Schema"."My Table"')
    return [
        Pattern(text, _like(match[1]), _like(match[2]), not (_is_wild(match[1]) or _is_wild(match[2])))
        for text, match in parsed.items()
        if match is not None
    ]


def quote(*names: str) -> str:
    """The names as SQL identifiers, joined by dots. Always quoted: no folding, no reserved words."""
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)


def _is_wild(part: str) -> bool:
    return not part.startswith('"') and ("*" in part or "?" in part)


def _like(part: str) -> str:
    quoted = part.startswith('"')
    plain = part[1:-1].replace('""', '"') if quoted else part
    escaped = re.sub(r"([\\%_])", r"\\\1", plain)
    return escaped if quoted else escaped.replace("*", "%").replace("?", "_")


def _like_to_regex(like: str) -> str:
    special = {"%": ".*", "_": "."}
    return "".join(
        re.escape(piece[1:]) if piece.startswith("\\") else special.get(piece, re.escape(piece))
        for piece in re.findall(r"\\.|.", like, re.DOTALL)
    )
