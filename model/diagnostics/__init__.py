"""Observe a model's activations and weights without changing the training."""
