"""Write checkpoints whole or not at all, verify and keep them, resume and branch from them."""
