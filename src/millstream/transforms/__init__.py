"""What a stream makes of its rows on the way to its targets: filters, then transforms in their order."""
