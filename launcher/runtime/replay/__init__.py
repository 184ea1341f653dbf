"""Recompute steps of a run, to check what it wrote and to find the samples that caused a spike."""
