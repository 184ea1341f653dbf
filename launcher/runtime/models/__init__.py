"""Open trained models, score them, average them."""
