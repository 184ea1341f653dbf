"""Ask linear probes what the slots of a thought know behind each layer: which nodes of a star graph's way.

    python tests/benchmarks/star_probe.py runs/star_graph_lookahead [--examples 3000]

The thought begins at the source, the last token from which the arm is open. A row is the text there, or a slot in a
pass; a column what enters the blocks, or leaves one. A cell has, for each node of the way behind the source, the share
of graphs in which a probe names it: ridge regression, fitted to two thirds of the graphs and scored on the rest. To
name a node by lot is right in a twelfth (of 12 labels), to know both arms in half. It prints one Markdown table.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plumbline.data.tasks.star_graph import StarGraphConfig
from plumbline.launcher.runtime.models.open import load_model
from plumbline.model.decoder import CausalLM, Decoder
from plumbline.model.lookahead.anchors import Anchors
from plumbline.model.lookahead.masks import text_of
from plumbline.model.lookahead.thoughts import Thinker, run_text


def main() -> None:
    """Probe a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="of a star graph with latent_lookahead")
    parser.add_argument("--examples", type=int, default=3000, help="held-out graphs (default: 3000)")
    arguments = parser.parse_args()
    trained = load_model(arguments.run, with_objective=True)
    task = None if trained.config is None else trained.config.data.train[0].task
    if not isinstance(trained.module, CausalLM) or not isinstance(task, StarGraphConfig):
        parser.error(f"{arguments.run} is no run that was trained on star_graph")
    examples = [task.example("validation", number) for number in range(arguments.examples)]
    tokens, labels = (torch.from_numpy(np.stack(part)) for part in zip(*examples, strict=True))
    source = int((labels[0] >= 0).nonzero()[1])  # of the answer's tokens the first is the source itself
    states = observe(trained.module.model, trained.decoding.thinker, tokens.to(trained.device), source)
    nodes = labels[:, source:]
    layers = len(next(iter(states.values()))) - 1
    print("| | input |" + "".join(f" layer {layer + 1} |" for layer in range(layers)))
    print("|---|" + "---|" * (layers + 1))
    for name, each in states.items():
        cells = (" / ".join(f"{named(x, node):.0%}" for node in nodes.T) for x in each)
        print(f"| {name} | " + " | ".join(cells) + " |")


@torch.no_grad()
def observe(decoder: Decoder, thinker: Thinker, tokens: Tensor, source: int) -> dict[str, list[Tensor]]:
    """Think at the source; return the text's and each slot's state ahead of the blocks and behind each, [B, D]."""
    seen: list[list[Tensor]] = [[] for _ in range(len(decoder.layers) + 1)]
    hooks = [decoder.layers[0].register_forward_pre_hook(partial(_keep_input, seen[0]))]
    hooks += [
        layer.register_forward_hook(partial(_keep_output, kept))
        for layer, kept in zip(decoder.layers, seen[1:], strict=True)
    ]
    text = text_of(decoder.config, {"input_ids": tokens, "document_ids": torch.zeros_like(tokens)})
    states, memory = run_text(decoder, tokens, text)
    anchors = Anchors(tokens.new_full((len(tokens), 1), source), torch.ones_like(tokens[:, :1], dtype=torch.bool))
    thinker(decoder, states, memory, text, anchors)
    for hook in hooks:
        hook.remove()
    found = {"text": [each[0][:, source] for each in seen]}
    for number in range(1, len(seen[0])):
        for slot in range(seen[0][number].size(1)):
            found[f"pass {number}, slot {slot + 1}"] = [each[number][:, slot] for each in seen]
    return found


def _keep_input(kept: list[Tensor], _layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    kept.append(inputs[0])


def _keep_output(kept: list[Tensor], _layer: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> None:
    kept.append(output)


def named(states: Tensor, nodes: Tensor) -> float:
    """Return the share of the last third of states [B, D] in which a probe fitted to the others names the node [B]."""
    x = torch.cat((states, torch.ones_like(states[:, :1])), dim=1).double().cpu()
    y = nn.functional.one_hot(nodes).double()
    fitted = 2 * len(x) // 3
    ridge = 1e-3 * fitted * x.square().mean() * torch.eye(x.size(1), dtype=x.dtype)
    weight = torch.linalg.solve(x[:fitted].T @ x[:fitted] + ridge, x[:fitted].T @ y[:fitted])
    return float(((x[fitted:] @ weight).argmax(1) == nodes[fitted:]).double().mean())


if __name__ == "__main__":
    main()
