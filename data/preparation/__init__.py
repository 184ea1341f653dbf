"""Implement prepare.py: inputs, duplicates, pieces, shards, growing and uploading a corpus."""
