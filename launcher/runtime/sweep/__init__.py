"""Sweep over a grid of runs, each a normal run folder and trained only once however often it is requested."""
