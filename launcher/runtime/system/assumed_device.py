"""Say what is assumed of a device that nobody has measured yet: an H100 with a network port of its own."""

PEAK_TFLOPS = 989.0
"""bf16, without sparsity."""
MFU = 0.4
"""Model FLOPs utilisation, without messages."""
NETWORK_GBS = 50.0
"""GB/s sent over the slowest link: a port of 400 Gb/s."""
