"""Shared fixtures. Each kind lives in a module of its own below tests/fixtures."""

import os

from hypothesis import HealthCheck, settings

from millstream.demo.engine import SHORT_LIVED_JVM
from tests.fixtures.examples import DRAW_NEW

pytest_plugins = [
    "tests.fixtures.postgres",
    "tests.fixtures.spark",
    "tests.fixtures.type_matrix",
    "tests.fixtures.engines",
    "tests.fixtures.s3",
    "tests.fixtures.captures",
    "tests.fixtures.stream_files",
]

# How long an example takes says something of the machine, not of what is tested. The examples are the same ones each
# time, so that a test fails for who has broken something; `make histories` draws new ones.
settings.register_profile(
    "patient",
    deadline=None,
    derandomize=not DRAW_NEW,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")

for name, value in SHORT_LIVED_JVM.items():
    os.environ.setdefault(name, value)
