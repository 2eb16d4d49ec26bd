"""The public API is `millstream.__all__`: importable, documented, and cheap until it is used."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import millstream

LIBRARY_PAGE = Path(__file__).parents[2] / "docs" / "library.md"


@pytest.mark.parametrize("name", millstream.__all__)
def test_every_public_name_can_be_imported_and_is_documented(name: str) -> None:
    assert getattr(millstream, name).__doc__
    assert re.search(rf"\b{name}\b", LIBRARY_PAGE.read_text()), f"docs/library.md does not mention {name}"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_like_that"):
        millstream.nothing_like_that  # noqa: B018


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import millstream, sys; print([m for m in ('pyspark', 'pyarrow', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
