"""Predict loss from parameters, tokens and bits with scaling laws: constants, consequences and fits."""
