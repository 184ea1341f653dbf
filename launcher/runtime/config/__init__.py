"""Define the configuration of a run: its keys, how it is read, and what is derived from it."""
