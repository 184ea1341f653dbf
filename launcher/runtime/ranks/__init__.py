"""Join the ranks of a run, whichever launcher started them, and let them agree."""
