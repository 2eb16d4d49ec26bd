"""An example of each command, shown at the end of its `--help`."""

from __future__ import annotations

import typer

EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": ("millstream demo --seconds 60 --keep",),
    "run": ("millstream run shop.yaml", "millstream run shop.yaml --once"),
    "check": ("millstream check shop.yaml --connect",),
    "apply": ("millstream apply shop.yaml",),
    "list": ("millstream list --home /var/lib/millstream",),
    "status": ("millstream status", "millstream status shop --json"),
    "pause": ("millstream pause shop --target lake",),
    "resume": ("millstream resume shop",),
    "replay": (
        "millstream replay shop --target copy --table public.orders --from-seq 1204",
        "millstream replay shop --from-time 2026-01-31T12:00:00+00:00",
    ),
    "reload": ("millstream reload shop --table public.orders",),
    "delete": ("millstream delete shop --keep-slot",),
    "verify": ("millstream verify shop", "millstream verify shop --target copy --repair"),
    "doctor": ("millstream doctor --json",),
    "bench": ("millstream bench drain --target delta",),
    "version": ("millstream version",),
    "snapshot create": ("millstream snapshot create shop --path ./kept",),
    "snapshot list": ("millstream snapshot list shop --path ./kept",),
    "snapshot inspect": ("millstream snapshot inspect shop --target copy --check",),
    "snapshot restore": ("millstream snapshot restore shop 20260131T120000000Z --target copy --overwrite",),
    "snapshot delete": ("millstream snapshot delete shop 20260131T120000000Z --target copy",),
    "snapshot prune": ("millstream snapshot prune shop --keep 5",),
    "dlq list": ("millstream dlq list shop --target copy",),
    "dlq show": ("millstream dlq show 17",),
    "dlq retry": ("millstream dlq retry 17 18", "millstream dlq retry --stream shop --target copy"),
    "dlq purge": ("millstream dlq purge 17",),
    "ddl list": ("millstream ddl list shop --pending",),
    "ddl show": ("millstream ddl show shop 1204",),
    "ddl approve": ("millstream ddl approve shop 1204",),
    "ddl reject": ("millstream ddl reject shop 1204",),
    "journal ls": ("millstream journal ls shop",),
    "journal cat": ("millstream journal cat shop --table public.orders --from 1204 --limit 10",),
    "journal verify": ("millstream journal verify shop",),
    "journal prune": ("millstream journal prune shop --older-than 7d --dry-run",),
    "journal rebase": ("millstream journal rebase shop",),
    "schema list": ("millstream schema list shop --table public.orders",),
    "schema show": ("millstream schema show shop public.orders --at 1204",),
    "schema diff": ("millstream schema diff shop public.orders --from 1 --to 3",),
}


def add_examples(app: typer.Typer, path: str = "") -> None:
    """Let each command of `app` and of its groups end its help with its examples. One without any is an error."""
    for command in app.registered_commands:
        name = f"{path}{command.name or getattr(command.callback, '__name__', '')}"
        # Click keeps the lines of a paragraph that begins with \b as they are.
        command.epilog = "\n".join(["\b", "Examples:", *(f"  {example}" for example in EXAMPLES[name])])
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_examples(group.typer_instance, f"{path}{group.name} ")
