"""Scale hyperparameters with the size of a model, by a table: CompleteP and its relatives."""
