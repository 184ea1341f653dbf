"""Provide what a run needs of the machine: processes, files, signals, Slurm."""
