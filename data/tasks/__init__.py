"""Compute examples of synthetic tasks from a seed, with answers scored by exact match."""
