"""Look a second time at the tests that failed while four processes ran at once: alone, in a process of their own.

    python scripts/second_look.py CACHE...

Each CACHE is the cache directory of a pytest that ran just now. Tests with servers, processes or threads may fail
because the machine was busy. One that passes alone is called flaky, aloud, since it is to be mended all the same; a
fault of the code fails again. Ends with 0 only if every test that failed has passed now. Nothing is looked at again if
that would change nothing, or would hide more than a coincidence: a file that could not be collected, too many tests.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

MOST = 5
"""If more tests than this have failed, it is not by coincidence."""


class Outcomes:
    """A plugin that keeps how each phase of each test ended."""

    def __init__(self) -> None:
        self.of: dict[str, list[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.of.setdefault(report.nodeid, []).append(report.outcome)

    def passed(self, test: str) -> bool:
        """Setup, the test itself and teardown; a test that was skipped now has not passed."""
        return self.of.get(test) == ["passed"] * 3


def failed_in(caches: Sequence[Path]) -> list[str]:
    """The tests that failed, and the files that could not be collected, in the order of their names."""
    lists = [cache / "v" / "cache" / "lastfailed" for cache in caches]
    return sorted({name for path in lists if path.exists() for name in json.loads(path.read_text())})


def why_not(failed: Sequence[str]) -> str | None:
    """The reason not to look again, if there is one."""
    if not failed:
        return "no test is known to have failed"
    if len(failed) > MOST:
        return f"{len(failed)} tests failed, more than the {MOST} that could be by coincidence"
    for name in failed:
        if "::" not in name:
            return f"{name} could not be collected"
    return None


def main(caches: Sequence[Path]) -> int:
    failed = failed_in(caches)
    reason = why_not(failed)
    if reason is not None:
        print(f"no second look at what failed: {reason}")
        return 1
    print("a second look, alone, at what failed: " + ", ".join(failed), flush=True)
    outcomes = Outcomes()
    pytest.main([*failed, "-p", "no:cacheprovider"], plugins=[outcomes])
    for test in failed:
        if outcomes.passed(test):
            print(f"FLAKY: {test}: failed beside the others, passed alone")
        else:
            print(f"FAILED AGAIN: {test}")
    return 0 if all(map(outcomes.passed, failed)) else 1


if __name__ == "__main__":
    sys.exit(main([Path(cache) for cache in sys.argv[1:]]))
