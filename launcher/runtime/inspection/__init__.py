"""Inspect the contents of a corpus, and the data of a run."""
