"""Synthetic tasks: examples computed from a seed, with answers to be scored by exact match."""
