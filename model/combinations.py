"""Refuse switches of a ModelConfig that exclude each other, and warn of combinations that have been seen to fail.

Each kind of block or attention states its own needs in its file (`Block.needs`, `Attention.needs`).
"""

from plumbline.model.attention import ATTENTIONS, attention_kind
from plumbline.model.attention.kind import Attention
from plumbline.model.blocks import block_kind
from plumbline.model.blocks.kind import Block
from plumbline.model.config import ModelConfig


def check_model(config: ModelConfig) -> ModelConfig:
    """Return the configuration if its kinds exist and its switches do not exclude each other.

    Raises:
        ValueError: names the two keys, their values and what would fit.
    """
    block, attention = block_kind(config), attention_kind(config)
    for what, needs in (
        (f"attention = {config.attention}", attention.needs),
        (f"block = {config.block}", block.needs),
    ):
        for need in needs:
            need.check(what, config)
    for name, kind in ATTENTIONS.items():
        given = [key for key in kind.own_keys if getattr(config, key) != ModelConfig.model_fields[key].default]
        if given and kind is not attention:
            raise ValueError(
                f"{given[0]} = {getattr(config, given[0])} belongs to attention: {name}, and it is {config.attention}; "
                "remove it"
            )
    if config.value_residual and block.attention_input is Block.attention_input:
        raise ValueError(f"value_residual = true: block = {config.block} has no attention_input to take values of")
    if config.value_residual and attention.values is Attention.values:
        raise ValueError(f"value_residual = true: attention = {config.attention} has no values")
    block.check_shape(config)
    return config


def cautions(config: ModelConfig) -> list[str]:
    """Return warnings, a sentence each, about settings that are allowed but have been seen to fail."""
    return [*block_kind(config).cautions(config), *attention_kind(config).cautions(config)]
