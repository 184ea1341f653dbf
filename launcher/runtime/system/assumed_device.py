"""Define the device assumed when none was measured: an H100 with its own network port."""

PEAK_TFLOPS = {"bf16": 989.0, "fp32": 67.0}
"""Precision -> peak without sparsity, by the data sheet of the H100 SXM; fp32 as torch multiplies it, without TF32."""
MFU = 0.4
"""Model FLOPs utilisation, without communication."""
NETWORK_GBS = 50.0
"""GB/s sent over the slowest link: a port of 400 Gb/s."""
