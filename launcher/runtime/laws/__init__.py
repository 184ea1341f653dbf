"""Read measured points, write fitted laws and their figures, and predict the loss of a configuration."""
