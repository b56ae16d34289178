"""Bytes and names of a checkpoint folder: headers, shards, index, side files. Knows no storage format."""
