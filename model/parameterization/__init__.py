"""CompleteP and its relatives, as a table."""
