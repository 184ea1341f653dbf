"""Optimizers, schedules, horizon rules and averages of weights."""
