"""Measure the cost of rounding a model, keep rows and reports of it, and write quantized folders."""
