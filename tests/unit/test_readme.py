"""What the README shows is what the program takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pyarrow as pa

from millstream import load_streams
from millstream.changelog import METADATA, schema
from millstream.cli.app import app
from millstream.model import Column, Relation

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_stream_file_is_right(tmp_path: Path) -> None:
    (text,) = blocks("yaml")
    (tmp_path / "shop.yaml").write_text(text)
    (stream,) = load_streams([tmp_path / "shop.yaml"])
    assert stream.source.tables == ("public.orders", "public.item_*")
    assert [target.kind for target in stream.targets] == ["files"]


def test_the_commands_and_their_options_exist() -> None:
    import typer

    known = {command.name: command for command in typer.main.get_command(app).commands.values()}  # type: ignore[attr-defined]
    shown = [
        line.split("#")[0] for block in blocks("sh") for line in block.splitlines() if line.startswith("millstream")
    ]
    assert shown
    for line in shown:
        _, name, *arguments = shlex.split(line)
        options = {option for parameter in known[name].params for option in parameter.opts}
        assert {argument for argument in arguments if argument.startswith("--")} <= options, line


def test_every_metadata_column_is_explained() -> None:
    relation = Relation(1, "public", "orders", "d", (Column("id", 23, key=True),), ("id",))
    assert isinstance(schema(relation), pa.Schema)
    for name in METADATA:
        assert f"`{name}`" in README, f"the README does not explain {name}"


def test_the_options_of_the_format_are_right() -> None:
    from millstream.spark.format_options import FormatOptions

    (shown,) = [block for block in blocks("python") if "readStream" in block]
    given = dict(re.findall(r'(\w+)="([^"]+)"', shown))
    assert FormatOptions.parse(given).table == "public.orders"
