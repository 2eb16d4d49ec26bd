"""The options of the target `postgres`, apart from its driver: reading a stream file needs none."""

from __future__ import annotations

from pydantic import Field

from millstream.config.schema import AuthRef
from millstream.targets.lanes.database import LaneOptions


class PostgresTargetOptions(LaneOptions):
    """Options of a target of kind `postgres`."""

    uri: str = Field(repr=False, description="`postgresql://user@host:port/database`, with libpq's parameters.")
    auth_ref: AuthRef | None = Field(None, description="Where the password is: `env:NAME` or `file:PATH`.")
