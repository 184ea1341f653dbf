"""Report the numbers of a run, as a page for people and a JSON document for programs."""
