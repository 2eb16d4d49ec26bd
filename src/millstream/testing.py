"""For tests of streams without a database: a source that does what a script says.

    script = Script(tmp_path / "shop")
    script.table("public.orders", {"id": "integer", "note": "text"}, key=["id"])
    stream = StreamSpec("shop", script.source("shop"), Mode.CDC, targets)
    script.insert("public.orders", id=1, note="first")

Everything behind the source is the real thing: capture process, journal, Spark, targets.
"""

from __future__ import annotations

from millstream.sources.scripted.script import Script, Transaction

__all__ = ["Script", "Transaction"]
