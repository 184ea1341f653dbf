"""Look at what a corpus holds, and at what a run saw."""
