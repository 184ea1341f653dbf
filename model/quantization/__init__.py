"""Quantization: fake quantizers, which round values to what a low-precision format could hold."""
