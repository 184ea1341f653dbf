"""Quantization: number formats, quantizers, models that compute with rounded values."""
