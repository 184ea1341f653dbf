"""Compute examples of synthetic tasks from a seed, with answers to be scored by exact match."""
