"""Round tensors to number formats, and compute with rounded values in models."""
