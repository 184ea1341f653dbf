"""Run the training loop, and watch it."""
