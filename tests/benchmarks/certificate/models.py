"""Generate small models for an engine to train: what they are made of is drawn from a seed.

A case is one model with its optimizer's groups, batches, ZeRO stage, precision, accumulation and optimizer. Cases 0 to
31 of a seed have every combination of the last four once, as do the next 32; all else is drawn for each.
"""

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plumbline.launcher.runtime.config.parse import parse
from plumbline.launcher.runtime.config.schema import Config
from plumbline.model.objectives.objective import Losses
from plumbline.model.parameterization.rows import ParameterRow

STEPS = 3
SAMPLES = 2
"""Sequences of a micro-batch."""
COMBINATIONS = list(product((0, 1, 2, 3), ("fp32", "bf16"), (1, 3), ("adamw", "muon")))
FEATURES = ("tied", "reused", "frozen", "resting", "checkpointed")


@dataclass(frozen=True)
class Call:
    """Say that a forward pass runs a block, and how."""

    block: int
    checkpointed: bool
    rests: bool
    """Whether it is left out of some micro-batches, and of all micro-batches of the second step."""


@dataclass(frozen=True)
class Case:
    """Hold what was drawn."""

    number: int
    seed: int
    stage: int
    precision: Literal["fp32", "bf16"]
    accumulation: int
    optimizer: Literal["adamw", "muon"]
    vocabulary: int
    width: int
    inner: tuple[int, ...]
    """Width inside each block."""
    calls: tuple[Call, ...]
    tied: bool
    frozen: int | None
    """Block whose first matrix is not trained."""
    grad_clip: float
    grad_clip_norm: Literal["plain", "base"]
    bucket: int
    """Elements of a message."""
    persistent: bool
    """Whether ZeRO-3 keeps small tensors whole, as it does by default."""
    offload: bool = False
    """Whether optimizer states are in the host's memory."""

    @property
    def rest(self) -> int:
        """Return which micro-batch resting blocks are left out of: the second; where states are offloaded, any."""
        if not self.offload or self.accumulation == 1:
            return 1
        return random.Random(f"resting {self.seed} {self.number}").randrange(self.accumulation)

    @property
    def features(self) -> list[str]:
        """Return which of FEATURES the model has."""
        blocks = [call.block for call in self.calls]
        found = {
            "tied": self.tied,
            "reused": len(set(blocks)) < len(blocks),
            "frozen": self.frozen is not None,
            "resting": any(call.rests for call in self.calls),
            "checkpointed": any(call.checkpointed for call in self.calls),
        }
        return [name for name in FEATURES if found[name]]

    def __str__(self) -> str:
        """Return: 17: stage 1, bf16, 3 micro-batches, muon, tied, reused."""
        parts = [f"stage {self.stage}", self.precision, f"{self.accumulation} micro-batches", self.optimizer]
        return f"{self.number}: {', '.join([*parts, *self.features, *(['offloaded'] if self.offload else [])])}"


def draw_case(seed: int, number: int) -> Case:
    """Return a case, by seed and number alone."""
    chance = random.Random(f"{seed} {number}")
    order = random.Random(f"{seed} {number // len(COMBINATIONS)}").sample(COMBINATIONS, len(COMBINATIONS))
    stage, precision, accumulation, optimizer = order[number % len(COMBINATIONS)]
    blocks = chance.randint(2, 4)
    order_of_blocks = [*range(blocks), *chance.choices(range(blocks), k=chance.choice([0, 0, 1, 2]))]
    if chance.random() < 0.5:
        chance.shuffle(order_of_blocks)
    resting = chance.choice([None, chance.randrange(blocks)])
    return Case(
        number,
        seed,
        stage,
        precision,  # type: ignore[arg-type]
        accumulation,
        optimizer,  # type: ignore[arg-type]
        vocabulary=chance.randint(17, 41),
        width=chance.choice([6, 9, 13, 16, 23]),
        inner=tuple(chance.choice([1, 5, 7, 16, 19]) for _ in range(blocks)),
        calls=tuple(Call(block, chance.random() < 0.3, block == resting) for block in order_of_blocks),
        tied=chance.random() < 0.4,
        frozen=chance.choice([None, None, chance.randrange(blocks)]),
        grad_clip=chance.choice([0.0, 0.05, 0.2, 100.0]),
        grad_clip_norm=chance.choice(["plain", "plain", "base"]),
        bucket=chance.choice([100, 600, 10**6]),
        persistent=chance.random() < 0.5,
    )


class Block(nn.Module):
    """Add to the stream what a small MLP makes of it, times a vector."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=inner % 2 == 0)
        self.scale = nn.Parameter(torch.empty(1))

    def forward(self, states: Tensor) -> Tensor:
        """Return the stream after the block, [B, T, D]."""
        mixed = self.down(torch.tanh(self.up(self.norm(states))))
        added: Tensor = states + self.scale.to(mixed.dtype) * mixed
        return added


class Targets(nn.Module):
    """Say of a batch what an engine asks an objective."""

    terms = ("cross_entropy",)
    reports = ()

    def on_step(self, _model: nn.Module, _step: int) -> None:
        """Change nothing."""

    def targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return how many labels count, [1]."""
        count: Tensor = (batch["labels"] >= 0).sum()
        return count[None]


class Generated(nn.Module):
    """Predict tokens as a case says; an engine takes it for a TrainedLM."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.objective = case, Targets()
        self.embed = nn.Embedding(case.vocabulary, case.width)
        self.blocks = nn.ModuleList(Block(case.width, inner) for inner in case.inner)
        self.norm = nn.LayerNorm(case.width)
        self.head = nn.Linear(case.width, case.vocabulary, bias=False)
        if case.tied:
            self.head.weight = self.embed.weight

    def forward(self, batch: Mapping[str, Tensor], step: int, **_through: object) -> Losses:
        """Return the summed loss of a micro-batch, whichever method an engine names."""
        number = int(batch["number"])
        states = self.embed(batch["input_ids"])
        for call in self.case.calls:
            if call.rests and (step == 1 or number == self.case.rest):
                continue
            block = self.blocks[call.block]
            states = checkpoint(block, states, use_reentrant=False) if call.checkpointed else block(states)
        logits = self.head(self.norm(states))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")
        return Losses(loss[None], loss.detach().float(), torch.zeros(0, 2, device=loss.device))


Gather = Callable[[nn.Parameter], AbstractContextManager[object]]


def build(
    case: Case,
    construction: AbstractContextManager[object] | None = None,
    gather: Gather = lambda _parameter: nullcontext(),
) -> Generated:
    """Return the model of a case with its first weights; `build_for_training` explains the arguments."""
    with construction or nullcontext():
        model = Generated(case)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        with torch.no_grad(), gather(parameter):
            draws = torch.Generator().manual_seed(1000 * case.number + number)
            drawn = 0.3 * torch.randn(parameter.shape, generator=draws)
            parameter.copy_(drawn + 1 if "norm.weight" in name or "scale" in name else drawn)
        parameter.requires_grad_(not is_frozen(case, name))
    return model


def is_frozen(case: Case, name: str) -> bool:
    """Return whether a tensor is not trained."""
    return case.frozen is not None and name == f"blocks.{case.frozen}.up.weight"


def rows(case: Case) -> tuple[ParameterRow, ...]:
    """Return the table of a case: each tensor has learning rate, decay and eps of one of five kinds, drawn for it."""
    chance = random.Random(f"groups {case.seed} {case.number}")
    kinds = [
        (chance.uniform(0.3, 3.0), 0.0 if number == 0 else chance.uniform(0.3, 3.0), 10 ** chance.uniform(-4, -2))
        for number in range(5)
    ]
    found = []
    for number, (name, parameter) in enumerate(Generated(case).named_parameters()):
        multiplier, decay, eps = kinds[number] if number < 2 else chance.choice(kinds)
        is_matrix = name.startswith("blocks") and parameter.ndim == 2
        role = "hidden_matrix" if is_matrix else "embedding" if parameter.ndim == 2 else "hidden_bias"
        lr, growth = 0.01 * multiplier, chance.choice([0.25, 1.0])
        shape, trains = tuple(parameter.shape), not is_frozen(case, name)
        row: Any = (name, role, shape, 0.0, 0.3, trains, lr, multiplier, decay, eps, growth)
        found.append(ParameterRow(*row))
    return tuple(found)


def configuration(case: Case, ranks: int) -> Config:
    """Return the configuration of a case; its model stands for the generated one."""
    samples = SAMPLES * case.accumulation * ranks
    values = {
        "run": {"name": "certificate"},
        "model": {"family": "qwen3", "vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1,
                  "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 8},
        "parameterization": {"rule": "sp"},
        "data": {"train": [{"path": "none"}], "sequence_length": 9, "global_batch_size": samples,
                 "micro_batch_size": SAMPLES},
        "optimizer": {"name": case.optimizer, "lr": 0.01, "grad_clip": case.grad_clip,
                      "grad_clip_norm": case.grad_clip_norm},
        "train": {"steps": STEPS, "compile": False},
        "deepspeed": {"precision": case.precision, "zero_stage": case.stage, "bucket_size": case.bucket,
                      "offload_optimizer": case.offload},
    }  # fmt: skip
    return parse(Config, values, "certificate")


def learning_rate(step: int) -> float:
    """Return the base learning rate of a step, which no two have in common."""
    return 0.01 * (1.0, 0.5, 0.7)[step]


def micro_batches(case: Case, step: int, ranks: int) -> list[list[dict[str, Tensor]]]:
    """Return what each rank trains on in a step; every micro-batch has another number of labels that count."""
    draws = torch.Generator().manual_seed(100 * case.number + step)

    def batch(number: int, rank: int) -> dict[str, Tensor]:
        tokens = torch.randint(case.vocabulary, (SAMPLES, 10), generator=draws)
        labels = tokens[:, 1:].clone()
        labels[:, 9 - (number + 2 * rank + step) % 5 :] = -100
        return {"input_ids": tokens[:, :-1], "labels": labels, "number": torch.tensor(number)}

    return [[batch(number, rank) for number in range(case.accumulation)] for rank in range(ranks)]
