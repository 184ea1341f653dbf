"""Quantize trained models: recipes, the methods behind them, and what they do to each layer."""
