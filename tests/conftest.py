"""Shared fixtures. Each kind lives in a module of its own below tests/fixtures."""

pytest_plugins = ["tests.fixtures.postgres", "tests.fixtures.spark"]
