"""Score models on tasks of lm-evaluation-harness."""
