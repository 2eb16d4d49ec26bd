"""Whether a target can be written to, as far as that shows without writing: for `millstream check --connect`.

What only a batch can find out (a table of somebody else's, a type that does not fit) is told when it comes.
"""

from __future__ import annotations

import os
from pathlib import Path

from millstream.errors import MillstreamError
from millstream.model import TargetSpec
from millstream.sources.base import Finding, Severity
from millstream.targets import open_target

_RIGHTS = """
SELECT current_user::text, current_database()::text, pg_is_in_recovery(),
    has_database_privilege(current_database(), 'CREATE') OR to_regnamespace('_millstream') IS NOT NULL
"""


def target_findings(stream: str, spec: TargetSpec) -> list[Finding]:
    """What keeps the target of a stream from being written to, or that it can be. Changes nothing."""
    who = f"{stream}/{spec.name}"
    try:
        open_target(spec)  # its package may be missing
        return [_database(who, spec) if spec.kind == "postgres" else _path(who, spec)]
    except MillstreamError as failed:
        fix = failed.hint or ("is the server up, and is the host of the uri right?" if failed.transient else None)
        return [Finding("target", Severity.ERROR, f"{who}: {failed.message}", fix)]


def _database(who: str, spec: TargetSpec) -> Finding:
    from millstream.targets.lanes import sessions

    session = sessions.take(str(spec.options["uri"]), spec.options.get("auth_ref"))
    try:
        with sessions.errors(session.where):
            ((role, database, standby, may_write),) = session.connection.execute(_RIGHTS.encode()).fetchall()
    finally:
        session.connection.close()
    if standby:
        return Finding(
            "target",
            Severity.ERROR,
            f"{who}: {session.where} is a standby, which takes no rows",
            "give the uri of its primary",
        )
    if not may_write:
        return Finding(
            "target",
            Severity.ERROR,
            f"{who}: role {role} may not create the schema _millstream in database {database}",
            f'GRANT CREATE ON DATABASE "{database}" TO "{role}"',
        )
    return Finding("target", Severity.OK, f"{who}: connected to {session.where} as {role}")


def _path(who: str, spec: TargetSpec) -> Finding:
    """A directory that can be made, or a file in one that is there."""
    path = Path(str(spec.options["path"])).absolute()
    is_file = spec.kind in ("sqlite", "duckdb")
    if path.exists() and path.is_dir() is is_file:
        wrong, fix = ("a directory", "a file") if is_file else ("a file", "a directory")
        return Finding("target", Severity.ERROR, f"{who}: {path} is {wrong}", f"give the path of {fix}")
    if is_file and not path.parent.is_dir():
        return Finding(
            "target", Severity.ERROR, f"{who}: the directory {path.parent} does not exist", f"mkdir -p {path.parent}"
        )
    there = path if path.exists() else next(parent for parent in path.parents if parent.exists())
    if not there.is_dir() and not is_file:
        return Finding("target", Severity.ERROR, f"{who}: {there} is a file", "give the path of a directory")
    if not os.access(there, os.W_OK | (os.X_OK if there.is_dir() else 0)):
        return Finding("target", Severity.ERROR, f"{who}: {there} cannot be written to", "choose another path")
    return Finding("target", Severity.OK, f"{who}: {path} can be written to")
