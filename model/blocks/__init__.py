"""List the blocks, which wire norms, branches and the residual stream; kind.py defines their interface."""

from plumbline.model.blocks.kind import Block
from plumbline.model.blocks.norm_free import NormFreeBlock
from plumbline.model.blocks.post_norm import PostNormBlock
from plumbline.model.blocks.pre_norm import PreNormBlock
from plumbline.model.blocks.sandwich_norm import SandwichNormBlock
from plumbline.model.blocks.skipless import SkiplessBlock
from plumbline.model.config import ModelConfig
from plumbline.model.kinds import kind_named

BLOCKS: dict[str, type[Block]] = {
    "pre_norm": PreNormBlock,
    "post_norm": PostNormBlock,
    "sandwich_norm": SandwichNormBlock,
    "norm_free": NormFreeBlock,
    "skipless": SkiplessBlock,
}


def block_kind(config: ModelConfig) -> type[Block]:
    """Return the block class that model.block names.

    Raises:
        ValueError: there is none of that name.
    """
    return kind_named(BLOCKS, "block", config.block)
