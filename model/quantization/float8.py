"""Train with the blocks' matrix products in float8, using torchao's layers in place of ours.

A recipe says which values share a scale: those of a tensor (tensorwise) or of a row (rowwise), the latter optionally
with weight gradients computed in bf16 (rowwise_with_gw_hp). Stored weights are unchanged.
"""

from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import nn

from plumbline.model.quantization.precision import PrecisionConfig

CAPABILITY = (8, 9)  # Ada, Hopper and later have float8 units

_UNCOMPILED = (
    "precision.float8 = {} with train.compile = false: scaling and rounding, each a pass of its own, take longer than "
    "float8 saves; leave train.compile out"
)


def refusal(precision: PrecisionConfig, device: torch.device, compiled: bool) -> str | None:
    """Return why float8 cannot be used here, or None if it can or is not needed."""
    if precision.float8 is None:
        return None
    if find_spec("torchao") is None:
        return f"precision.float8 = {precision.float8} needs torchao, which is missing: pip install -e '.[float8]'"
    if precision.float8_emulated:
        return None
    actual = "a CPU"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) >= CAPABILITY:
            return None if compiled else _UNCOMPILED.format(precision.float8)
        actual = f"{torch.cuda.get_device_name(device)} with {major}.{minor}"
    return (
        f"precision.float8 = {precision.float8} needs a GPU of capability {CAPABILITY[0]}.{CAPABILITY[1]} or more, and "
        f"this is {actual}: leave it out, or set precision.float8_emulated=true to try the configuration, slowly"
    )


def compute_in_float8(blocks: nn.Module, precision: PrecisionConfig) -> None:
    """Replace the linear layers of blocks in place if `precision.float8` is set; parameters keep their names."""
    if precision.float8 is None:
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = Float8LinearConfig.from_recipe_name(precision.float8)
    # Padding: the gradient of a weight sums over tokens, whose number is up to the objective
    convert_to_float8_training(blocks, config=replace(recipe, emulate=precision.float8_emulated, pad_inner_dim=True))
