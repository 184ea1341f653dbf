"""Training objectives, one file each: (model, batch) -> summed loss and named metrics."""
