"""Nothing in a forward or backward pass makes the host wait for the device: it runs where tensors hold no values."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from plumbline.model.combinations import check_model
from plumbline.model.config import ModelConfig
from plumbline.model.families import FAMILIES
from plumbline.model.objectives import ObjectiveConfig
from plumbline.model.objectives.objective import ObjectiveSettings, TrainedLM
from plumbline.model.parameterization.config import ParameterizationConfig
from plumbline.model.parameterization.multipliers import multipliers
from tests.model.conftest import SHAPE, packed_batch

WAITS = (DataDependentOutputException, DynamicOutputShapeException)
"""What tensors without values raise where a value is asked for: item, bool, tolist; nonzero, selection by a mask."""
OBJECTIVES = {
    name: kind for kind in get_args(ObjectiveConfig) for name in get_args(kind.model_fields["name"].annotation)
}
KEYS: list[dict[str, Any]] = [
    *(
        {"name": name, **({"z_loss": 1e-4} if "z_loss" in kind.model_fields else {})}
        for name, kind in OBJECTIVES.items()
    ),
    *({"name": "latent_lookahead", "anchor_policy": policy} for policy in ("response_start", "random", "entropy")),
    {"name": "latent_lookahead", "commit": "thoughts", "growth": "fixed"},
]
DOCUMENTS = torch.tensor([[0] * 10 + [1] * 14, [0] * 24])


def take_a_step(config: ModelConfig, objective: ObjectiveSettings) -> tuple[Tensor, int]:
    """Return the losses of packed documents, some of whose labels are ignored, and how many tensors have gradients."""
    batch = packed_batch(DOCUMENTS, ignored=3)
    with FakeTensorMode() as mode:
        forward = multipliers(config, ParameterizationConfig(rule="sp"))
        model = TrainedLM(config, forward, objective.make(config, forward, 0)).train()
        fake = {name: mode.from_tensor(tensor) for name, tensor in batch.items()}
        model.objective.on_step(model, 1)
        losses = model.losses(fake, 1)
        (losses.terms / model.objective.targets(fake).clamp_min(1)).sum().backward()
        return losses.terms, sum(parameter.grad is not None for parameter in model.parameters())


def make_config(family: str) -> ModelConfig:
    """Return a model that sees one document of a sample at a time, where its attention can."""
    keys = {**SHAPE, "family": family}
    try:
        return check_model(ModelConfig.model_validate({**keys, "document_mask": True, "dropout": 0.1}))
    except ValueError:
        return check_model(ModelConfig.model_validate(keys))


def combinations() -> Iterator[Any]:
    """Yield every objective with every family that it can train."""
    for keys in KEYS:
        objective = OBJECTIVES[keys["name"]].model_validate(keys)
        for family in FAMILIES:
            config = make_config(family)
            if not list(objective.problems(config, DOCUMENTS.size(1), None)):
                yield pytest.param(config, objective, id="-".join([*map(str, keys.values()), family]))


@pytest.mark.parametrize(("config", "objective"), combinations())
def test_a_step_waits_for_no_value(config: ModelConfig, objective: ObjectiveSettings) -> None:
    terms, gradients = take_a_step(config, objective)
    assert isinstance(terms, FakeTensor)
    assert gradients, "and the backward pass ran"


@pytest.mark.parametrize(
    "waits", [lambda x: x.sum().item(), lambda x: bool(x.any()), lambda x: x[x > 0], torch.nonzero]
)
def test_tensors_without_values_notice_who_waits(waits: Any) -> None:
    with FakeTensorMode(), pytest.raises(WAITS):
        waits(torch.ones(3))
