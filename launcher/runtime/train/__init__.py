"""The training loop and what watches it."""
