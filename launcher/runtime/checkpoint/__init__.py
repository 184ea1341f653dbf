"""Write checkpoints atomically, verify and keep them, resume and branch from them."""
