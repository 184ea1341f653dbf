"""Quantize trained models: recipes, methods, and reports on each layer."""
