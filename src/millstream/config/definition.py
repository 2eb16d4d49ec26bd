"""A stream as the state store remembers it: plain JSON, without a secret in it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from millstream.model import Json, StreamSpec
from millstream.secrets import redact


def definition(spec: StreamSpec) -> Json:
    """The stream as JSON. Passwords are starred out; what refers to one (`auth_ref`) stays."""
    value: dict[str, Any] = asdict(spec)
    value["mode"] = spec.mode.value
    source = value["source"]
    source["uri"] = redact(spec.source.uri)
    source["ack"] = spec.source.ack.value
    source["on_limit"] = spec.source.on_limit.value
    source["tables"] = list(spec.source.tables)
    value["targets"] = list(value["targets"])
    for target in value["targets"]:
        if isinstance(target["options"].get("uri"), str):
            target["options"] = {**target["options"], "uri": redact(target["options"]["uri"])}
    return value
