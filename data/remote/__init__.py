"""Read corpora from where fsspec reaches, through a folder of this machine that all processes share."""
