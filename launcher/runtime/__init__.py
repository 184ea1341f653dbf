"""Turn a configuration into a running job: processes, engine, optimizer groups, schedule, loop, checkpoints."""
