"""Update weights: optimizers, schedules, horizon rules, and averages of weights."""
