"""Processes, files, signals, Slurm: what a run needs of the machine."""
