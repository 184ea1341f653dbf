"""Make steps of a run again: to check what it wrote, and to find the samples that did something to it."""
