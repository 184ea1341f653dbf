"""Train a generated model in plain PyTorch, in one process that sees the whole batch: what an engine is held to.

For fp32 everything is computed in fp64. For bf16 the weights are rounded for each forward pass (at stage 0, where the
engine promises autocast over fp32 weights, that is what happens here), micro-batches are separate, because a gradient
is rounded once for each, and their sum is fp64. What is computed in bf16, passes and Muon's orthogonalisation, is
computed on the engine's device, because another one rounds other sums. A tensor without a gradient has a gradient of
zero.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plumbline.model.parameterization.rows import ParameterRow
from tests.benchmarks.certificate.models import Case, build, learning_rate, rows

LINEAR = F.linear  # ZeRO-3 puts another one in its place, for good
MOMENTUM = 0.95


def _multiply_then_add(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return F.linear in two operations, each rounded to bf16, as under ZeRO-3."""
    product = states.matmul(weight.t())
    return product if bias is None else product + bias


class PlainLoop:
    """Hold weights, optimizers and their states, all in fp64 but for matrices under Muon, which torch wants in fp32."""

    def __init__(self, case: Case, betas: tuple[float, float], device: torch.device) -> None:
        self.case, self.rows = case, {row.name: row for row in rows(case)}
        self.device = device if case.precision == "bf16" else torch.device("cpu")
        drawn = dict(build(case).named_parameters())
        if case.precision == "bf16" and case.stage > 0:
            drawn = {name: nn.Parameter(weight.detach().bfloat16()) for name, weight in drawn.items()}
        self.weights = {
            name: nn.Parameter(weight.detach().to(device if self._is_for_muon(name) else "cpu", self._dtype(name)))
            for name, weight in drawn.items()
        }
        self.gradients: dict[str, Tensor] = {}
        trained = [row for row in self.rows.values() if row.trainable]
        matrices = [row for row in trained if self._is_for_muon(row.name)]
        others = [row for row in trained if not self._is_for_muon(row.name)]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW([self._group(row) | {"eps": row.eps} for row in others], betas=betas, foreach=False)
        ]
        if matrices:
            groups = [self._group(row) for row in matrices]
            self.optimizers.append(torch.optim.Muon(groups, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"))

    def _dtype(self, name: str) -> torch.dtype:
        return torch.float32 if self._is_for_muon(name) else torch.float64

    def _is_for_muon(self, name: str) -> bool:
        return self.case.optimizer == "muon" and self.rows[name].role == "hidden_matrix"

    def _group(self, row: ParameterRow) -> dict[str, Any]:
        return {"params": [self.weights[row.name]], "weight_decay": row.weight_decay, "of": row}

    def backward(self, batches: Sequence[Sequence[Mapping[str, Tensor]]], step: int) -> float:
        """Compute the gradient of the mean loss over all labels of all ranks; return that loss."""
        case, sharded = self.case, self.case.stage > 0
        half = case.precision == "bf16"
        dtype = torch.float64 if not half else torch.bfloat16 if sharded else torch.float32
        model = build(case).to(self.device, dtype)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(self.weights[name])
        targets = sum(int((batch["labels"] >= 0).sum()) for share in batches for batch in share)
        self.gradients = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in parameters.items()}
        total = 0.0
        for batch in (batch for share in batches for batch in share):
            batch = {name: value.to(self.device) for name, value in batch.items()}
            autocast = torch.autocast(self.device.type, torch.bfloat16) if half and not sharded else nullcontext()
            with patch.object(F, "linear", _multiply_then_add if half and case.stage == 3 else LINEAR):
                with autocast:
                    loss = model(batch, step).terms.sum()
                total += loss.item() / targets
                # As large as in the engine, whose ranks are averaged: what bf16 rounds depends on nothing else then
                (loss * (len(batches) / targets)).backward()
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    self.gradients[name] += parameter.grad.double().cpu() / len(batches)
                    parameter.grad = None
        return total

    def clip(self) -> float:
        """Limit the gradient as the case says, and return its norm before."""
        growth = {row.name: row.gradient_growth if self.case.grad_clip_norm == "base" else 1 for row in self._trained}
        squares = [(self.gradients[name] / size).square().sum() for name, size in growth.items()]
        norm = float(torch.stack(squares).sum().sqrt())
        if self.case.grad_clip and norm > self.case.grad_clip:
            for gradient in self.gradients.values():
                gradient *= self.case.grad_clip / norm
        return norm

    @property
    def _trained(self) -> list[ParameterRow]:
        return [row for row in self.rows.values() if row.trainable]

    def update(self, step: int) -> None:
        """Take one step of every optimizer with the gradient as it is."""
        for row in self._trained:
            weight = self.weights[row.name]
            weight.grad = self.gradients[row.name].to(weight)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step) * group["of"].lr_multiplier
            optimizer.step()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state of every trained tensor by its name."""
        states = {parameter: state for optimizer in self.optimizers for parameter, state in optimizer.state.items()}
        return {name: dict(states.get(parameter, {})) for name, parameter in self.weights.items()}

    def go_on_from(self, weights: Mapping[str, Tensor]) -> None:
        """Put other weights in place, so that each step is compared by itself."""
        with torch.no_grad():
            for name, weight in weights.items():
                self.weights[name].copy_(weight)
