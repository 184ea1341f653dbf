"""Define the configuration of a run: what may be written, how it is read, and what follows from it."""
