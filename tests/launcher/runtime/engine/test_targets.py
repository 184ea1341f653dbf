"""An engine says of which shape the targets of an objective are, if not one number for each term of its loss."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from plumbline.launcher.runtime.engine.base import Engine
from plumbline.model.objectives.next_token import NextToken, NextTokenConfig


@pytest.mark.parametrize(("targets", "shape"), [(torch.tensor(8), r"\[\]"), (torch.tensor([8, 8]), r"\[2\]")])
def test_targets_are_as_many_as_terms(targets: torch.Tensor, shape: str) -> None:
    engine = cast("Engine", SimpleNamespace(model=SimpleNamespace(objective=NextToken(NextTokenConfig()))))
    with pytest.raises(TypeError, match=rf"NextToken: targets of shape {shape}, expected \[1\]"):
        Engine._check_targets(engine, targets)
    Engine._check_targets(engine, torch.tensor([8]))
