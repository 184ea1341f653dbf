"""Take training steps of a sharded model, behind one interface for every engine."""
