"""Define the decoder, its parameterization, objectives and exports in pure PyTorch, without DeepSpeed or Slurm."""
