"""Define the device assumed when none was measured: an H100 with its own network port."""

PEAK_TFLOPS = 989.0
"""Peak in bf16, without sparsity."""
MFU = 0.4
"""Model FLOPs utilisation, without communication."""
NETWORK_GBS = 50.0
"""GB/s sent over the slowest link: a port of 400 Gb/s."""
