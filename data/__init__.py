"""Turn text into token files, and token files into batches; nothing here knows of a model.

`prepare` turns text into a corpus on disk, `open_corpus` reads one back, `TrainOrder` says which window
of which corpus is sample number g, and `TrainBatches` / `ValidationBatches` turn samples into tensors.
"""
