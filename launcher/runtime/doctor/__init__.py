"""Check before a run whether these nodes can run it, and which one cannot."""
