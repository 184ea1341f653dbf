"""Read corpora from any fsspec URL, through a local cache folder that all processes share."""
