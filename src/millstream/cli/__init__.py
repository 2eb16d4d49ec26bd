"""The command `millstream`."""

from __future__ import annotations


def main() -> None:
    """Run the command and exit: 0 fine, 1 failed, 2 wrong use."""
    from millstream.cli.app import app

    app(prog_name="millstream")
