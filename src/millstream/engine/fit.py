"""Making targets from what a program, or an older version, says: whatever is wrong with it is one of our errors."""

from __future__ import annotations

from pydantic import ValidationError

from millstream import targets
from millstream.errors import ConfigError
from millstream.model import TargetSpec
from millstream.targets.base import Target


def open_target(spec: TargetSpec) -> Target:
    """As `targets.open_target`; options that are wrong are a ConfigError too, without their values."""
    try:
        return targets.open_target(spec)
    except ValidationError as wrong:
        said = "; ".join(
            f"{'.'.join(str(part) for part in error['loc'])}: {error['msg']}"
            for error in wrong.errors(include_input=False, include_url=False)
        )
        raise ConfigError(f"target {spec.name}: {said}") from None
