"""Entry points, one file for each command; what they share lives in `runtime/`."""
