"""Compare our loss head with full logits, torch's own fused one and Liger's: time of forward and backward, and memory.

    python tests/benchmarks/loss_head.py [--tokens 4096 --width 768 --vocabulary 50304 --rounds 7] [--dtype bf16]

Each takes hidden states [tokens, width] and the unembedding matrix to a summed cross-entropy and to the gradients of
both. They take turns, so that drift of the machine strikes all alike; medians are compared, `ratio` is theirs over
ours. Memory is the peak on a GPU, above what the inputs take. `error` is how far the unembedding's gradient is from the
one of fp64, as a share of its norm. Those that this torch or environment lacks, or that do not run on the device, are
left out. It prints one JSON object.
"""

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plumbline.launcher.runtime.models.open import device_named
from plumbline.model.linear_cross_entropy import compiled_losses_and_gradient, linear_cross_entropy

SIZES = {"tokens": 4096, "width": 768, "vocabulary": 50304, "rounds": 7}
OTHER_CHUNKS = (2048, 8192)
EXACT_TOKENS = 1024
Head = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Hidden states, weight and labels -> the summed loss, in nats."""


def ours(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """Return what ours computes."""
    return linear_cross_entropy(hidden, weight, labels, **options)[0]


def heads(device: torch.device) -> dict[str, Head]:
    """Return those that this environment has, ours first."""
    compiled = partial(ours, on_chunk=compiled_losses_and_gradient())
    found: dict[str, Head] = {
        "ours": ours,
        "ours, compiled": compiled,
        "full logits": lambda hidden, weight, labels: F.cross_entropy(
            (hidden @ weight.T).float(), labels, reduction="sum"
        ),
    }
    for tokens in OTHER_CHUNKS if device.type == "cuda" else ():
        found[f"ours, compiled, {tokens} tokens a chunk"] = partial(compiled, chunk=tokens)
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is not None:  # without them torch's function forms full logits as well
        found["torch, in chunks"] = lambda hidden, weight, labels: F.linear_cross_entropy(
            hidden, weight, labels, reduction="sum", options=options()
        )
    if device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # type: ignore[import-not-found]

        liger = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        found["liger"] = lambda hidden, weight, labels: liger(weight, hidden, labels)
    return found


def time_once(head: Head, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[float, float, float]:
    """Return seconds, the peak of memory in MB above what is there (0 on a CPU), and the loss per token."""
    hidden.grad = weight.grad = None
    on_gpu = hidden.device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    start = time.perf_counter()
    loss = head(hidden, weight, labels)
    loss.backward()
    value = loss.item() / len(labels)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    return seconds, peak / 1e6, value


def exact_gradient(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of the unembedding in fp64, a few tokens at a time."""
    gradient = torch.zeros_like(weight, dtype=torch.float64)
    with torch.no_grad():
        for states, targets in zip(hidden.double().split(EXACT_TOKENS), labels.split(EXACT_TOKENS), strict=True):
            slope = (states @ weight.double().T).softmax(-1)
            slope.scatter_add_(1, targets[:, None], torch.full_like(slope[:, :1], -1.0))
            gradient.addmm_(slope.T, states)
    return gradient


def main() -> None:
    """Measure one size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--device", help="cpu, cuda, ... (default: the first GPU if there is one)")
    arguments = parser.parse_args()
    device, dtype = device_named(arguments.device), {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.dtype]
    torch.manual_seed(0)
    hidden = torch.randn(arguments.tokens, arguments.width, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(arguments.vocabulary, arguments.width, device=device, dtype=dtype).div_(arguments.width**0.5)
    weight.requires_grad_()
    labels = torch.randint(arguments.vocabulary, (arguments.tokens,), device=device)
    known = heads(device)
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in known}
    errors: dict[str, float] = {}
    exact = exact_gradient(hidden, weight, labels)
    for round_number in range(arguments.rounds + 1):  # the first warms up
        for name, head in known.items():
            found = time_once(head, hidden, weight, labels)
            if round_number:
                taken[name].append(found)
            else:
                assert weight.grad is not None
                errors[name] = float((weight.grad.double() - exact).norm() / exact.norm())
    del exact
    ours = statistics.median(seconds for seconds, _, _ in taken["ours"])
    results: list[dict[str, Any]] = []
    for name, turns in taken.items():
        seconds = statistics.median(turn[0] for turn in turns)
        results.append(
            {
                "head": name,
                "seconds": seconds,
                "ratio": round(seconds / ours, 3),
                "peak_mb": round(max(turn[1] for turn in turns)) or None,
                "loss": round(turns[0][2], 4),
                "error": float(f"{errors[name]:.3g}"),
            }
        )
    print(json.dumps({"setting": {**vars(arguments), "device": str(device)}, "results": results}, indent=2))


if __name__ == "__main__":
    main()
