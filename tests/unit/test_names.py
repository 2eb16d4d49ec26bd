"""What is said of a name that is not there."""

from __future__ import annotations

import pytest

from millstream.names import instead

TABLES = ["public.items", "public.orders"]


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        ("shup", ["bank", "shop"], "did you mean shop?"),
        ("orders", TABLES, "did you mean public.orders?"),
        ("publik.orders", TABLES, "did you mean public.orders?"),
        ("public.none", TABLES, "it has public.items, public.orders"),
        (
            "x",
            [f"t{number:02}" for number in range(12)],
            "it has t00, t01, t02, t03, t04, t05, t06, t07, t08, t09, ...",
        ),
        ("x", [], "there is none"),
    ],
)
def test_the_nearest_name_is_suggested_or_those_there_are(name: str, known: list[str], said: str) -> None:
    assert instead(name, known) == said
