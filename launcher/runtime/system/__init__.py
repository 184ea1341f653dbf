"""Provide what a run needs from the machine: processes, files, signals, Slurm."""
