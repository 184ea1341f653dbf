"""Entry points, one file a verb; what they share lives in `launcher.runtime`."""
