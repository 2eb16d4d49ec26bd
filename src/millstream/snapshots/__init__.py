"""States of targets, kept aside: the rows of a target's tables and its cursor, as they were at one moment."""

RESTORE, SNAPSHOT = "restore", "snapshot"
"""Under which names the state store remembers the last of each, by target."""
WAITING, RESTORED, DONE, FAILED = "waiting", "restored", "done", "failed"
"""The states of a restore. `restored`: the target has it, and its delivery does not go on from there yet."""
UNDONE = (WAITING, RESTORED)
