"""Block families, one file each: how norms, branches and the residual stream are wired."""
