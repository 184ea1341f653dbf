"""Read measured points, write fitted laws and their figures, and predict what a configuration comes to."""
