"""Report what the numbers of a run say, as one page for people and one JSON document for programs."""
