"""Behind launcher/quantize.py: what rounding costs a model, rows and reports of it, quantized folders."""
