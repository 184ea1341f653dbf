"""What replaces DeepSpeed's own sums of gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from plumbline.launcher.runtime.engine import deepspeed_fixes


@pytest.mark.parametrize("ranks", [1, 2])
def test_sums_begin_with_the_first_gradient_of_a_step(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    averaged: list[int] = []
    monkeypatch.setattr(deepspeed_fixes, "_average_shares", lambda _zero, ranks, _dtype: averaged.append(ranks))
    sums = [torch.tensor([7.0, 7.0]), torch.tensor([9.0])]
    zero = SimpleNamespace(fp32_groups_gradients=[sums], fp32_groups_has_gradients=[[False, False]])
    engine = SimpleNamespace(optimizer=zero, communication_data_type=torch.float32)
    deepspeed_fixes.sum_where_gradients_lie(engine, ranks)
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    for _ in range(2):
        parameter.grad = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
        zero.accumulate_hp_grads_and_remove_lp(parameter, 0, 0)
        assert parameter.grad is None
    assert sums[0].tolist() == [2, 4]

    engine.buffered_allreduce_fallback(elements_per_buffer=3)
    assert sums[1].tolist() == [0]  # nothing has given to it on this rank; on others something may have
    assert averaged == [2] * (ranks > 1)
    zero.clear_hp_grads()
    assert zero.fp32_groups_has_gradients == [[False, False]]
