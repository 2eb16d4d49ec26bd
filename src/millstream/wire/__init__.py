"""Rows as others want to read them, made by column."""
