"""The attention branch, one file for each kind of map over positions."""

from torch import Tensor, nn

from model.attention.context import LayerCache
from model.attention.mixing import MixingAttention
from model.attention.pruned import PrunedAttention, PrunedCache
from model.attention.shaped import ShapedAttention
from model.attention.softmax import SoftmaxAttention
from model.config import ModelConfig
from model.multipliers import Multipliers


def make_attention(config: ModelConfig, multipliers: Multipliers, layer: int) -> nn.Module:
    """The attention branch of block number `layer`."""
    if config.attention == "mixing":
        return MixingAttention(config)
    kinds = {"softmax": SoftmaxAttention, "shaped": ShapedAttention, "pruned": PrunedAttention}
    return kinds[config.attention](config, multipliers, layer)


def make_cache(config: ModelConfig, batch: int, capacity: int, like: Tensor) -> LayerCache | PrunedCache:
    """An empty cache of one layer for up to `capacity` tokens, on the device and of the dtype of `like`."""
    if config.attention == "pruned":
        return PrunedCache(batch, config, like.device, like.dtype)
    return LayerCache(batch, capacity, config, like.device, like.dtype)
