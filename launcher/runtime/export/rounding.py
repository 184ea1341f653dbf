"""Round the weights of an exported folder to bf16, after it was verified in fp32."""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from plumbline.data.damage import read_object
from plumbline.launcher.runtime.config.stock import WEIGHTS
from plumbline.launcher.runtime.export.report import ExportError
from plumbline.launcher.runtime.export.verify import check_tokens
from plumbline.launcher.runtime.system.files import write_json

INDEX = "model.safetensors.index.json"
TOLERANCE = 0.05
"""Allowed max |logit difference| / max |logit|: bf16 keeps 8 bits of each weight, so several times 2^-9 is usual."""


@torch.no_grad()
def round_to_bf16(folder: Path, output: Path, own_code: bool) -> float:
    """Replace the fp32 weights of a folder by their nearest bf16 values, and say so in its config.json.

    Args:
        folder: the folder, which transformers can load.
        output: its later name, for errors.
        own_code: whether its class is in the folder.

    Returns:
        max |logit difference| / max |logit| between both folders, computed in fp32.

    Raises:
        ExportError: the difference is larger than rounding may make it.
    """
    from transformers import AutoModelForCausalLM

    def logits() -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=own_code).eval()
        found: torch.Tensor = model(input_ids=check_tokens(model.config)).logits
        return found

    exact = logits()
    size = 0
    for file in sorted(folder.glob(WEIGHTS)):
        with safe_open(file, "pt") as tensors:
            rounded = {name: tensors.get_tensor(name).to(torch.bfloat16) for name in tensors.keys()}  # noqa: SIM118
        save_file(rounded, file, {"format": "pt"})
        size += sum(tensor.nbytes for tensor in rounded.values())
    if (folder / INDEX).is_file():
        index = read_object(folder / INDEX)
        write_json(folder / INDEX, index | {"metadata": {**index.get("metadata", {}), "total_size": size}})
    write_json(folder / "config.json", read_object(folder / "config.json") | {"dtype": "bfloat16"})
    error = float((logits() - exact).abs().max() / exact.abs().max())
    if not error <= TOLERANCE:
        raise ExportError(
            f"{output}: with weights rounded to bf16, logits differ by {error:.1e} of the largest (allowed "
            f"{TOLERANCE:g}); nothing was exported: leave out --dtype bf16"
        )
    return error
