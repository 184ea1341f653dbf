"""A configuration becomes a running job: distributed set-up, engine, optimizer groups, schedule, loop, checkpoints."""
