"""What the databases we write to have in common: a transaction with the cursor in it, mirrors, changelogs."""
