"""Compare generation with our cache with that of the stock class of transformers: tokens/s of greedy continuations.

    python tests/benchmarks/generation_speed.py [--layers 6 --width 384 --prompt 64 --tokens 64 --rounds 5]
        [--rows 1,8] [--dtype bf16]

Both have random weights of one shape and continue the same prompts by the same number of tokens, in turns; medians are
compared, `ratio` is the seconds of the stock class over ours. It prints one JSON object.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests`, however this file is started

from plumbline.launcher.runtime.models.open import device_named
from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.generation import cached_reader, continue_together
from plumbline.model.objectives.next_token import NextTokenConfig
from plumbline.model.sampling import GREEDY
from tests.benchmarks.lookahead_cost import make
from tests.benchmarks.stock import stock_model
from tests.benchmarks.turns import take_turns

SIZES = {"layers": 6, "width": 384, "vocabulary": 8192, "prompt": 64, "tokens": 64, "rounds": 5}


def measure(arguments: argparse.Namespace, rows: int, device: torch.device) -> dict[str, Any]:
    """Time both with so many prompts at once."""
    shape = ModelConfig(  # type: ignore[call-arg]  # the rest is filled in
        family="qwen3",
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=max(1, arguments.width // 64),
        max_position_embeddings=arguments.prompt + arguments.tokens,
    )
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.dtype]
    ours, stock = make(shape, NextTokenConfig()).to(device, dtype), stock_model(shape).to(device, dtype).eval()
    prompt = torch.randint(arguments.vocabulary, (rows, arguments.prompt), device=device)
    asked: dict[str, Any] = {"do_sample": False, "min_new_tokens": arguments.tokens, "max_new_tokens": arguments.tokens}
    seconds = take_turns(
        {
            "ours": lambda: continued(ours, prompt, arguments.tokens),
            "stock": lambda: stock.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **asked),
        },
        arguments.rounds,
        device,
    )
    return {
        "rows": rows,
        "tokens_per_second": round(rows * arguments.tokens / seconds["ours"]),
        "stock_tokens_per_second": round(rows * arguments.tokens / seconds["stock"]),
        "ratio": round(seconds["stock"] / seconds["ours"], 3),
    }


def continued(model: CausalLM, prompt: torch.Tensor, tokens: int) -> list[list[int | None]]:
    """Continue prompts [B, T] greedily, as `generate.py` does."""
    rows = prompt.tolist()
    read = cached_reader(model, len(rows), prompt.size(1) + tokens)
    drawing = [torch.Generator(prompt.device) for _ in rows]  # greedy decoding draws nothing
    return list(continue_together(read, rows, tokens, generators=drawing, sampling=GREEDY))


def main() -> None:
    """Measure each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", default="1,8", help="prompts at once")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    arguments = parser.parse_args()
    device = device_named(None)
    torch.manual_seed(0)
    results = [measure(arguments, int(rows), device) for rows in arguments.rows.split(",")]
    print(json.dumps({"setting": {**vars(arguments), "device": device.type}, "results": results}, indent=2))


if __name__ == "__main__":
    main()
