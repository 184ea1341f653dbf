"""The attention branch, one file for each kind of map over positions."""

from torch import Tensor, nn

from plumbline.model.attention.context import LayerCache
from plumbline.model.attention.mixing import MixingAttention
from plumbline.model.attention.pruned import PrunedAttention, PrunedCache
from plumbline.model.attention.shaped import ShapedAttention
from plumbline.model.attention.softmax import SoftmaxAttention
from plumbline.model.config import ModelConfig
from plumbline.model.parameterization.multipliers import Multipliers


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
