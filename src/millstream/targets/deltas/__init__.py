"""Delta tables as the target `delta` writes them."""
