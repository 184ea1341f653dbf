"""Laws from files and to files: measured points, the fitted law, its figures, what it says of a configuration."""
