"""Measure what rounding costs a model, keep rows and reports of it, and write quantized folders."""
