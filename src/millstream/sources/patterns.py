"""Which tables a stream means, whatever the kind of its source."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millstream.model import Relation
from millstream.sources.postgres.patterns import parse_patterns


def matcher(patterns: Sequence[str]) -> Callable[[Relation], bool]:
    """Says of a relation whether one of the patterns names it. Every kind of source writes them alike."""
    parsed = parse_patterns(patterns)
    return lambda relation: any(pattern.matches(relation.schema, relation.name) for pattern in parsed)
