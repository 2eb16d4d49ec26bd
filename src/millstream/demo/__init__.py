"""The demonstration: a small shop, a live load, a crash, and a proof."""
