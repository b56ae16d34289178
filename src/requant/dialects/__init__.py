"""Dialects: what the parts of a format are called on disk, and how config.json speaks of them."""
