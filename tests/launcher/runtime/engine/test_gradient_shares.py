"""How gradients are summed at stage 1 in bf16: from the first of a step on, over ranks as soon as they are whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from plumbline.launcher.runtime.engine.gradient_shares import GradientShares

SIZES = [[2, 2], [4]]
"""Elements of the tensors of two groups; the model has the second group's first, then the others."""


class Step:
    """Make the gradient of a step on one of `ranks` ranks, of which the others give zeros."""

    def __init__(self, ranks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        groups = [[nn.Parameter(torch.zeros(n, dtype=torch.bfloat16)) for n in sizes] for sizes in SIZES]
        flat = [torch.full((4,), 7.0) for _ in SIZES]  # what an earlier step has left
        self.last = False
        self.sent: list[list[float]] = []
        self.waiting: list[Tensor] = []
        self.parameters = groups
        self.shares = [whole.narrow(0, 0, 4 // ranks) for whole in flat]
        self.zero: Any = SimpleNamespace(
            bf16_groups=groups,
            fp32_groups_gradients=[list(whole.split(sizes)) for whole, sizes in zip(flat, SIZES, strict=True)],
            fp32_groups_has_gradients=[[False] * len(group) for group in groups],
            fp32_groups_gradients_flat=flat,
            fp32_groups_gradient_flat_partition=self.shares,
            real_dp_process_group=[None, None],
        )
        in_order = [*groups[1], *groups[0]]
        self.engine: Any = SimpleNamespace(
            optimizer=self.zero,
            communication_data_type=dtype,
            module=SimpleNamespace(parameters=lambda: in_order),
            is_gradient_accumulation_boundary=lambda: self.last,
        )
        monkeypatch.setattr(dist, "reduce_scatter_tensor", self._send)
        GradientShares(self.engine, ranks)

    def _send(self, part: Tensor, message: Tensor, group: None, async_op: bool) -> Any:
        assert async_op
        assert group is None
        assert part.data_ptr() == message.data_ptr()
        self.sent.append(message.tolist())
        self.waiting.append(part)
        return SimpleNamespace(wait=lambda: self.waiting.remove(part) if part is self.waiting[0] else 1 / 0)

    def gradient(self, group: int, index: int, value: float) -> None:
        """Have the backward pass complete the gradient of a tensor."""
        parameter = self.parameters[group][index]
        parameter.grad = torch.full_like(parameter, value)
        self.zero.accumulate_hp_grads_and_remove_lp(parameter, group, index)
        assert parameter.grad is None

    def finish(self) -> list[list[float]]:
        """End the last backward pass; returns the shares of both groups."""
        self.engine.buffered_allreduce_fallback(elements_per_buffer=3)
        assert not self.waiting
        return [share.tolist() for share in self.shares]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Step:
    return Step(2, request.param, monkeypatch)


def test_a_group_is_sent_once_its_last_micro_batch_is_whole(step: Step) -> None:
    for group, index in ((0, 1), (0, 0), (1, 0)):
        step.gradient(group, index, 1)
    assert step.sent == [], "another micro-batch follows"
    step.last = True
    step.gradient(0, 1, 2)
    assert step.sent == []
    step.gradient(0, 0, 4)
    assert step.sent == [[5, 5, 3, 3]], "while the rest is computed"
    step.gradient(1, 0, 6)
    assert step.sent == [[5, 5, 3, 3], [7, 7, 7, 7]]
    assert step.finish() == [[2.5, 2.5], [3.5, 3.5]], "the mean over ranks"


def test_all_ranks_send_in_one_order_whatever_is_whole_first(step: Step) -> None:
    step.last = True
    step.gradient(1, 0, 6)
    step.gradient(0, 0, 4)
    assert step.sent == [], "a rank whose batch uses all of the first group sends that first"
    assert step.finish() == [[2, 2], [3, 3]]
    assert step.sent == [[4, 4, 0, 0], [6, 6, 6, 6]], "zeros where no micro-batch gave a gradient"


def test_the_next_step_begins_anew(step: Step) -> None:
    step.last = True
    for _ in range(2):
        step.gradient(0, 1, 2)
        step.gradient(0, 0, 4)
        step.gradient(1, 0, 6)
        assert step.sent == [[4, 4, 2, 2], [6, 6, 6, 6]]
        assert step.finish() == [[2, 2], [3, 3]]
        step.zero.clear_hp_grads()
        assert step.zero.fp32_groups_has_gradients == [[False, False], [False]]
        step.sent.clear()


def test_a_single_rank_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(1, torch.float32, monkeypatch)
    step.gradient(0, 1, 2)
    step.last = True
    step.gradient(0, 1, 2)
    assert step.finish() == [[0, 0, 4, 4], [0, 0, 0, 0]]
    assert step.sent == []
