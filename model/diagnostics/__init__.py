"""Observe what a model's activations and weights do, without changing anything about training."""
