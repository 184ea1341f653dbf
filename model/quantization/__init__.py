"""Round to number formats by quantizers, and compute with rounded values in models."""
