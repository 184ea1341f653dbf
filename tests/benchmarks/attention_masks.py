"""Compare attention under masks: plain causal, documents and a window, written out and in blocks (FlexAttention).

    python tests/benchmarks/attention_masks.py [--length 2048 --batch 4 --heads 12 --shared 12 --head-dim 64 --rounds 7]
        [--layers 12] [--documents 8] [--window 512] [--dtype bf16]

Each way makes its mask once, as a model does, and goes forward and backward through the attention of --layers; `ratio`
is its time over plain causal attention's. --shared is the number of heads of keys and values. Documents are of equal
length. Masks in blocks need a GPU. It prints one JSON object.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests`, however this file is started

from plumbline.launcher.runtime.models.open import device_named
from plumbline.model.attention.block_sparse import block_sparse_attention
from plumbline.model.attention.context import attention_context
from plumbline.model.attention.softmax import fused_attention
from plumbline.model.config import ModelConfig
from tests.benchmarks.turns import Way, compared, take_turns

SIZES = {
    "length": 2048,
    "batch": 4,
    "heads": 12,
    "shared": 12,
    "head-dim": 64,
    "rounds": 7,
    "layers": 12,
    "documents": 8,
    "window": 512,
}


def make_way(arguments: argparse.Namespace, device: torch.device, mask: str, in_blocks: bool) -> Way:
    """Return one way: its mask, then the attention of every layer, forward and backward."""
    length, batch = arguments.length, arguments.batch
    config = ModelConfig(  # type: ignore[call-arg]  # the rest is filled in
        vocab_size=2,
        hidden_size=arguments.heads * arguments.head_dim,
        num_hidden_layers=1,
        num_attention_heads=arguments.heads,
        max_position_embeddings=length,
        sliding_window=arguments.window if mask == "window" else None,
    )
    places = torch.arange(length, device=device)[None]
    ids = (places * arguments.documents // length).expand(batch, -1) if mask == "documents" else None
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.dtype]
    heads = (arguments.heads, arguments.shared, arguments.shared)
    inputs = [
        torch.randn(batch, count, length, arguments.head_dim, device=device, dtype=dtype, requires_grad=True)
        for count in heads
    ]
    scale = arguments.head_dim**-0.5

    def attend(query: Tensor, key: Tensor, value: Tensor) -> None:
        seen = attention_context(config, places, 0, ids, dtype, in_blocks).mask
        for _ in range(arguments.layers):  # one after another, or all would keep what their backward pass needs
            if isinstance(seen, BlockMask):
                found = block_sparse_attention(query, key, value, seen, scale)
            else:
                found = fused_attention(query, key, value, seen, scale, 0.0, seen is None, query.is_cuda)
            found.sum().backward()

    return partial(attend, *inputs)


def main() -> None:
    """Measure one size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    arguments = parser.parse_args()
    device = device_named(None)
    torch.manual_seed(0)
    asked = [("causal", False), ("documents", False), ("window", False)]
    if device.type == "cuda":
        asked += [("documents", True), ("window", True)]
    ways = {
        f"{mask}, in blocks" if in_blocks else mask: make_way(arguments, device, mask, in_blocks)
        for mask, in_blocks in asked
    }
    results = compared(take_turns(ways, arguments.rounds, device), "mask")
    print(json.dumps({"setting": {**vars(arguments), "device": device.type}, "results": results}, indent=2))


if __name__ == "__main__":
    main()
