"""Cells of sweeps that nobody trained."""

from typing import Any

from plumbline.launcher.runtime.sweep.result import Label, Result, RunOutcome


def make_result(labels: dict[str, Label], seed: int, outcome: RunOutcome, **changes: Any) -> Result:
    """Return a cell of the base size, with other values where they are given."""
    values = {
        "signature": "",
        "run": "",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "base_hidden_size": 64,
        "base_num_hidden_layers": 2,
        "parameters": 1000,
        "weight_bits": 16,
        "activation_bits": 16,
        "kv_bits": 16,
        "weight_format": None,
        "lr": 0.1,
    }
    return Result(labels, seed, outcome=outcome, **{**values, **changes})
