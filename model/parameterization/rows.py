"""One row of the parameterization's table."""

import functools
import math
import re
from dataclasses import dataclass
from typing import Literal
import torch
from pydantic import BaseModel, PositiveFloat, PositiveInt, model_validator
from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.parameterization.initialization import first_std, first_value, is_trainable
from plumbline.model.parameterization.multipliers import Multipliers
from plumbline.model.objectives import ObjectiveConfig, make_objective
from plumbline.model.objectives.objective import TrainedLM
from plumbline.model.parameterization.roles import Role, fans_of, role_of


@dataclass(frozen=True)
class ParameterRow:
    """Everything the parameterization decides for one tensor; lr, weight_decay and eps are peak values."""

    name: str
    role: Role
    shape: tuple[int, ...]
    init_mean: float
    init_std: float
    trainable: bool
    """Whether the optimizer sees it; a frozen tensor stays as it was drawn."""
    lr: float
    lr_multiplier: float
    """lr / base lr: the optimizer's group runs at schedule(t) * lr_multiplier."""
    weight_decay: float
    eps: float

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)
