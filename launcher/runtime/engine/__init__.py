"""Training engines: one step of a sharded model."""
