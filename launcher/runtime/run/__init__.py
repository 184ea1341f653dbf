"""Keep the run folder and its metrics, and open what a run reads."""
