"""Predict loss from parameters, tokens and bits by scaling laws: their constants, consequences and fits."""
