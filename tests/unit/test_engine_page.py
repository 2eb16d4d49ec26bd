"""The examples of docs/engine.md, run as they stand there, with Spark's part played in this process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millstream import Engine
from millstream.testing import Script, await_events
from tests.fixtures.engines import delivered

PAGE = Path(__file__).parents[2] / "docs" / "engine.md"


def test_the_examples_of_the_engine_page_work(
    tmp_path: Path,
    script: Script,
    no_spark: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    managing, testing = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)

    def work() -> None:
        script.insert("public.orders", id=1, note="worked")
        await_events(Engine("home"), "shop", 1)

    exec(managing, {"source": script.source("main"), "work": work})  # noqa: S102 - the documentation is what is tested
    assert "paused 1 Checkpoint(seq=1, " in capsys.readouterr().out
    assert Engine("home").list_streams() == []
    exec(testing, {})  # noqa: S102
    expected = [(1, "first"), (1, "second"), (2, "after the outage")]
    assert delivered(tmp_path.parent, tmp_path.name, "tested") == {"public.orders": expected}
