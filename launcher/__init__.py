"""Run commands, one file for each; what they share lives in `runtime/`."""
