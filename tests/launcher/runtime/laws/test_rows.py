"""Rows of quantization reports as points of a law: which of them are one, and of what."""

from __future__ import annotations

import json
import math
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


def test_weights_rounded_to_as_many_bits_as_inputs_had_are_a_point_of_no_law(tmp_path: Path) -> None:
    row = {"parameters": 30e6, "tokens": 1e9, "activation_bits": 4, "kv_bits": 16, "base_loss": 3.0, "loss": 3.1}
    rows = [
        {**row, "run": "a", "weight_bits": 16, "post_bits": 4},
        {**row, "run": "a", "weight_bits": 16, "post_bits": 3},
        {**row, "run": "b", "weight_bits": 4, "post_bits": 4},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    found = read_rows([file])
    assert list(found.measured.at.post_bits) == [math.inf, 3, 4, math.inf]
    assert found.left_out == {
        "with inputs or keys and values trained in no more bits than weights were rounded to": 1,
        "repeated": 1,
    }


def test_rows_that_come_twice_count_once_though_they_name_no_run(tmp_path: Path) -> None:
    widths = dict.fromkeys(("weight_bits", "activation_bits", "kv_bits"), 16)
    rows = [{"parameters": 30e6, "tokens": tokens, **widths, "loss": 3.0} for tokens in (1e9, 2e9)]
    files = [tmp_path / name for name in ("points.jsonl", "copy.jsonl")]
    for file in files:
        file.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    found = read_rows(files)
    assert list(found.measured.at.tokens) == [1e9, 2e9]
    assert list(found.measured.runs) == [0, 1]
    assert found.left_out == {"repeated": 2}
