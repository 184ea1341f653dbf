"""Text to token files to batches: everything about data, and nothing about models.

`prepare` turns text into a corpus on disk, `open_corpus` reads one back, `TrainOrder` says which window
of which corpus is sample number g, and `TrainBatches` / `ValidationBatches` turn samples into tensors.
"""
