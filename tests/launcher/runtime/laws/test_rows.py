"""Rows of quantization reports as points of a law: which of them are one, and of what."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from plumbline.launcher.runtime.laws.rows import read_rows

if TYPE_CHECKING:
    from pathlib import Path


def test_a_recipe_that_rounds_nothing_makes_no_second_point_of_its_checkpoint(tmp_path: Path) -> None:
    """Rotation and SmoothQuant alone change the loss by no more than arithmetic does."""
    widths = dict.fromkeys(("weight_bits", "activation_bits", "kv_bits"), 16)
    row: dict[str, Any] = {"run": "a", "parameters": 30e6, "tokens": 1e9, **widths, "post_bits": None, "base_loss": 3.0}
    rows = [
        {**row, "post": {"name": "turned", "rotate": True}, "loss": 3.01},
        {**row, "post": {"name": "smooth", "smooth": 0.5}, "loss": 3.02},
        {**row, "post": {"name": "rtn-w4"}, "post_bits": 4, "loss": 3.5},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    found = read_rows([file])
    assert sorted(found.measured.loss) == [3.0, 3.5]
    assert found.left_out == {"rotated or smoothed after training, and not quantized": 2, "repeated": 2}
    _, deltas = found.measured.post_deltas()
    assert list(deltas) == [0.5]
