"""Say before a run whether these nodes can carry it, and which one cannot."""
