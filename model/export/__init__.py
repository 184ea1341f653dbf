"""Export weights as stock Hugging Face classes, with the parameterization's multipliers folded in exactly."""
