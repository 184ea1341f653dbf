"""The report of a run: what its numbers say, as one page for people and one JSON document for programs."""
