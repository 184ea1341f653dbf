"""Add a branch to the residual stream: s x + r g dropout(branch).

s is `skip_gain` at the base depth (`multipliers` has its scaling rule), r the parameterization's residual multiplier
(CompleteP: m_L^-alpha, arXiv 2505.01618 Table 1), and g the branch gain: a constant, or learned from the initial value
`branch_gain_init`. With alpha = 1/2 and a fixed gain this is the residual of Outlier Protected blocks (arXiv
2405.19279), with a learned vector it is LayerScale.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plumbline.model.config import ModelConfig
from plumbline.model.parameterization.multipliers import Multipliers
from plumbline.model.parameterization.tensors import TensorRule


def _first_gain(model: ModelConfig) -> float:
    return model.branch_gain_init


class Residual(nn.Module):
    """Add a branch [B, T, hidden_size] to the stream."""

    tensors = (
        TensorRule("gain", "hidden_norm", start=_first_gain),
        TensorRule("scalar", "hidden_scalar", start=_first_gain),
    )

    def __init__(self, config: ModelConfig, multipliers: Multipliers, gain_is_elsewhere: bool = False) -> None:
        """Build it.

        Args:
            config: the model's switches.
            multipliers: the parameterization's constants.
            gain_is_elsewhere: whether the branch ends in a norm, whose gain is the branch gain.
        """
        super().__init__()
        self.dropout, self.skip, self.multiplier = config.dropout, multipliers.skip, multipliers.residual
        if config.branch_gain == "fixed" and not gain_is_elsewhere:
            self.multiplier *= config.branch_gain_init
        self.scalar = nn.Parameter(torch.empty(1)) if config.branch_gain == "scalar" else None
        self.gain = nn.Parameter(torch.empty(config.hidden_size)) if config.branch_gain == "vector" else None

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        """Return the stream x with the branch added: exactly x + branch if every factor is 1."""
        branch = F.dropout(branch, self.dropout, self.training)
        learned = self.scalar if self.gain is None else self.gain
        if learned is not None:
            branch = branch * learned
        if self.skip != 1.0:
            x = x * self.skip
        return torch.add(x, branch, alpha=self.multiplier)
