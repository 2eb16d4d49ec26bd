"""The schemas of a source's tables: versions, fingerprints, and what changed between them."""
