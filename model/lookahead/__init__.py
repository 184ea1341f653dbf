"""Think about future tokens in the model's own state space: latent lookahead (arXiv 2603.20219).

anchors.py      at which tokens to think
masks.py        who sees whom
thoughts.py     the passes that think
generation.py   decoding with thoughts
"""
