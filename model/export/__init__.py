"""Export our weights as stock Hugging Face classes, with the parameterization's multipliers folded exactly."""
