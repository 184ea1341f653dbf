"""Scaling laws that know precision: loss from parameters, tokens and bits; their constants, consequences and fits."""
