"""Block families, one file each: how norms, branches and the residual stream are wired."""

from model.blocks.norm_free import NormFreeBlock
from model.blocks.post_norm import PostNormBlock
from model.blocks.pre_norm import PreNormBlock
from model.blocks.sandwich_norm import SandwichNormBlock
from model.blocks.skipless import SkiplessBlock
from model.config import ModelConfig
from model.multipliers import Multipliers

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
