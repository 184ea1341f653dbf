"""The run folder, its metrics, and what a run reads."""
