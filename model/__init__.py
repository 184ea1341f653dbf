"""The decoder, its parameterization, objectives and exports: pure PyTorch, no DeepSpeed, no Slurm, no run folders."""
