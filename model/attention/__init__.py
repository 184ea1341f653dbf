"""The attention branch, one file for each kind of map over positions."""

from torch import nn

from model.attention.mixing import MixingAttention
from model.attention.shaped import ShapedAttention
from model.attention.softmax import SoftmaxAttention
from model.config import ModelConfig
from model.multipliers import Multipliers


def make_attention(config: ModelConfig, multipliers: Multipliers, layer: int) -> nn.Module:
    """The attention branch of block number `layer`."""
    if config.attention == "mixing":
        return MixingAttention(config)
    kind = ShapedAttention if config.attention == "shaped" else SoftmaxAttention
    return kind(config, multipliers, layer)
