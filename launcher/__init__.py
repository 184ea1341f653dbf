"""Run commands, one file for each; `runtime/` has the code that they share."""
