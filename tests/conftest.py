"""Shared fixtures. Each kind lives in a module of its own below tests/fixtures."""

import os

from millstream.demo.engine import SHORT_LIVED_JVM

pytest_plugins = [
    "tests.fixtures.postgres",
    "tests.fixtures.spark",
    "tests.fixtures.type_matrix",
    "tests.fixtures.engines",
]

for name, value in SHORT_LIVED_JVM.items():
    os.environ.setdefault(name, value)
