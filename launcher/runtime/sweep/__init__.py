"""Sweep over a grid of runs, each a normal run folder, trained once however often it is asked for."""
