"""The number that says how far loss curves lie apart, of curves for which it is known."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.loss_collapse import describe, smoothed


def test_a_spread_is_the_distance_of_the_outermost_curves_after_the_first_tenth() -> None:
    falling = np.linspace(3, 1, 40)
    begins_elsewhere = np.concatenate((np.full(4, 9.0), falling[4:]))
    curves = {"small": {1: falling, 2: falling}, "large": {1: begins_elsewhere - 0.5, 2: begins_elsewhere - 0.3}}
    found = describe(curves)
    assert found["spread"] == pytest.approx(0.4)
    # Without one seed 0.3 and 0.5: sqrt((2 - 1) / 2 x sum of squares around 0.4)
    assert found["standard_error"] == pytest.approx(0.1)
    assert found["noise"] == pytest.approx((0 + 0.2) / 2)
    assert found["last"] == {"small": 1.0, "large": pytest.approx(0.6)}


def test_runs_of_any_length_have_as_many_parts(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "loss": 5.0},
        {"step": 1, "kurtosis": 3.0},
        *({"step": k, "loss": float(k)} for k in range(2, 8)),
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert smoothed(tmp_path / "metrics.jsonl", 3).tolist() == [(5 + 2 + 3) / 3, 4.5, 6.5]
