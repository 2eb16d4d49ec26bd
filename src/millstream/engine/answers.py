"""What a request to the process that runs a home is answered with: `result`, or the `error` there was instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import millstream.errors
from millstream.errors import MillstreamError, RequestFailed
from millstream.model import Json


def error_answer(failed: MillstreamError) -> Json:
    """The answer to a request that could not be done."""
    return {"error": {"kind": type(failed).__name__, "message": failed.message, "hint": failed.hint}}


def unpacked(answer: Mapping[str, Any]) -> Json:
    """The result of an answer. Raises the error that it is instead."""
    error = answer.get("error")
    if error is None:
        return dict(answer["result"])
    kind = getattr(millstream.errors, error["kind"], None)
    if not (isinstance(kind, type) and issubclass(kind, MillstreamError)):
        kind = RequestFailed
    raise kind(error["message"], hint=error["hint"])
