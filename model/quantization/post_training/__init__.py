"""Post-training quantization: recipes, the methods behind them, and what they do to each layer of a trained model."""
