"""Name what several rooms read in a run's folder. What one room alone writes and reads, it names itself.

docs/run-folder.md lists all of them.
"""

CHECKPOINTS = "checkpoints"
"""Folder of step_00001000 and so on (checkpoint/store.py)."""
CONFIG = "config.yaml"
"""The resolved configuration, as of the last start; a checkpoint has that of its save under the same name."""
METRICS = "metrics.jsonl"
"""A line for each logged step (run/metrics.py)."""
