"""Ask Slurm for nodes, and know what became of a job and of its nodes."""
