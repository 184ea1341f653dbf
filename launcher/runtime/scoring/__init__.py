"""Score models on held-out text and tasks, in one way for training and for all comparisons."""
