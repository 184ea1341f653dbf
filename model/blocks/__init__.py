"""Block families, one file each: how norms, branches and the residual stream are wired."""

from plumbline.model.blocks.norm_free import NormFreeBlock
from plumbline.model.blocks.post_norm import PostNormBlock
from plumbline.model.blocks.pre_norm import PreNormBlock
from plumbline.model.blocks.sandwich_norm import SandwichNormBlock
from plumbline.model.blocks.skipless import SkiplessBlock
from plumbline.model.config import ModelConfig
from plumbline.model.parameterization.multipliers import Multipliers

Block = PreNormBlock | PostNormBlock | SandwichNormBlock | NormFreeBlock | SkiplessBlock

KINDS: dict[str, type[Block]] = {
    "pre_norm": PreNormBlock,
    "post_norm": PostNormBlock,
    "sandwich_norm": SandwichNormBlock,
    "norm_free": NormFreeBlock,
    "skipless": SkiplessBlock,
}


def make_block(config: ModelConfig, multipliers: Multipliers, layer: int) -> Block:
    """Block number `layer` of the decoder."""
    return KINDS[config.block](config, multipliers, layer)
