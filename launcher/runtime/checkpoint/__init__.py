"""Checkpoints: written whole or not at all, verified, kept, branched from."""
