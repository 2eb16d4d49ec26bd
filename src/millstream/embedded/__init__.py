"""A real Postgres of our own, for the demo, the tests and trying things out. Never for production data."""

from millstream.embedded.binaries import server_directory
from millstream.embedded.postgres import EmbeddedPostgres

__all__ = ["EmbeddedPostgres", "server_directory"]
