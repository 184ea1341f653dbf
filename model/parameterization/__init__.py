"""Scale hyperparameters with model size according to a table: CompleteP and related rules."""
