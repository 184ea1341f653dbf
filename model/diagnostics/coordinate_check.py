"""Check that every activation, and its change in training, keeps its size as the model grows.

A model takes a few optimizer steps on one fixed batch at a constant learning rate. At some steps we record the sizes of
activations and how far they have moved since initialisation. Over models of several widths or depths, the slope of
log2(quantity) against log2(size) tells what grows (and blows up) or shrinks (and freezes). Changes are the stronger
test, since absolute values hide a frozen layer. Weight decay and eps do not show here; unit tests cover them.

Method: Tensor Programs V (arXiv 2203.03466, appendix D.1) for width; CompleteP (arXiv 2505.01618, section 3) for depth.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.model.attention import attention_kind
from plumbline.model.decoder import CausalLM
from plumbline.model.parameterization.tensors import tensor_rule

Activations = dict[str, list[Tensor]]  # name -> one tensor for each occurrence
Record = dict[str, float]  # quantity -> value

SIZES = ("embedding", "attention_logits", "attention", "mlp", "residual", "logits")
CHANGES = ("embedding", "attention_logits", "attention", "block", "residual", "logits")


@torch.no_grad()
def activations(model: CausalLM, input_ids: Tensor) -> Activations:
    """Run one forward pass on input_ids [B, T], and return the activations.

    embedding: stream into the first block; attention_logits: scaled products of all queries and keys before the rotary
    embedding, which preserves lengths (missing without queries); attention, mlp: branch outputs of each block, before
    the residual multiplier; block: output minus input of each block, a skip gain included; residual: stream out of the
    last block; logits.
    """
    seen: Activations = {name: [] for name in (*SIZES, "block", "query", "key")}

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda _module, _inputs, output: seen[name].append(output.float())

    def added(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen["block"].append((output - inputs[0]).float())

    places = {"attention": "self_attn", "mlp": "mlp"}
    norms = {"query": "self_attn.q_norm", "key": "self_attn.k_norm"}
    there = dict(model.model.layers[0].named_modules())
    if attention_kind(model.config).scaled_module(model.config) is not None and there.keys() >= set(norms.values()):
        places |= norms
    hooks = []
    for layer in model.model.layers:
        hooks += [layer.get_submodule(path).register_forward_hook(keep(name)) for name, path in places.items()]
        hooks.append(layer.register_forward_hook(added))
    hooks.append(model.model.layers[0].register_forward_pre_hook(lambda _m, x: seen["embedding"].append(x[0])))
    hooks.append(model.model.norm.register_forward_pre_hook(lambda _m, x: seen["residual"].append(x[0].float())))
    try:
        seen["logits"].append(model(input_ids))
    finally:
        for hook in hooks:
            hook.remove()
    scale = model.multipliers.attention
    for query, key in zip(seen.pop("query"), seen.pop("key"), strict=True):  # (B, T, H or H_kv, head_dim)
        key = key.repeat_interleave(query.size(2) // key.size(2), dim=2)
        seen["attention_logits"].append(torch.einsum("bqhd,bkhd->bhqk", query, key) * scale)
    return seen


class BlockMaps:
    """Measure how far each block's function has moved, on the inputs that it had at initialisation.

    Activations also change because a block's input changes; this isolates the change of the block itself.
    """

    @torch.no_grad()
    def __init__(self, model: CausalLM, input_ids: Tensor) -> None:
        self._blocks = list(model.model.layers)
        self._arguments: list[tuple[Any, ...]] = []
        hooks = [
            block.register_forward_pre_hook(lambda _module, arguments: self._arguments.append(arguments))
            for block in self._blocks
        ]
        try:
            model(input_ids)
        finally:
            for hook in hooks:
                hook.remove()
        self._start = self._added()

    def _added(self) -> list[Tensor]:
        """Return what each block adds to the initial stream."""
        pairs = zip(self._blocks, self._arguments, strict=True)
        return [(block(*arguments) - arguments[0]).float() for block, arguments in pairs]

    @torch.no_grad()
    def change(self) -> float:
        """Return the RMS of the change, mean over blocks."""
        differences = [now - start for now, start in zip(self._added(), self._start, strict=True)]
        return _mean([difference.square().mean().sqrt() for difference in differences])


def measure(now: Activations, start: Activations) -> Record:
    """Return mean |x| of activations (`size/...`) and the RMS of their change since `start` (`change/...`).

    Both are averaged over blocks; quantities that no block has are left out.
    """
    record = {f"size/{name}": _mean([x.abs().mean() for x in now[name]]) for name in SIZES if now[name]}
    for name in (name for name in CHANGES if now[name]):
        differences = [x - x_0 for x, x_0 in zip(now[name], start[name], strict=True)]
        record[f"change/{name}"] = _mean([d.square().mean().sqrt() for d in differences])
    return record


@torch.no_grad()
def spectral_norms(model: CausalLM, start: Mapping[str, Tensor]) -> Record:
    """Return the mean spectral norm of the hidden matrices and of their change, each times sqrt(fan_in / fan_out).

    Both stay constant under the spectral condition for feature learning (arXiv 2310.17813), and are nan if a weight is
    not finite.
    """
    weights = dict(model.named_parameters())
    hidden = [name for name in weights if tensor_rule(model, name).role == "hidden_matrix"]

    def mean_norm(matrices: list[Tensor]) -> float:
        if not all(w.isfinite().all() for w in matrices):
            return math.nan  # the decomposition refuses such a matrix
        return _mean([torch.linalg.matrix_norm(w, 2) * math.sqrt(w.size(1) / w.size(0)) for w in matrices])

    return {
        "spectral/hidden": mean_norm([weights[name] for name in hidden]),
        "spectral_change/hidden": mean_norm([weights[name] - start[name] for name in hidden]),
    }


def _mean(values: Sequence[Tensor]) -> float:
    return float(torch.stack(list(values)).mean())


def coordinate_check(
    model: CausalLM, optimizer: torch.optim.Optimizer, input_ids: Tensor, labels: Tensor, record_at: Sequence[int]
) -> dict[int, Record]:
    """Train on one batch [B, T] up to the last step of `record_at`, recording on the way.

    Args:
        model: initialised model, trained in place.
        optimizer: over the model, with constant learning rates.
        input_ids: token ids of the batch.
        labels: the token that follows each of them.
        record_at: steps at which to record, ascending; 0 is initialisation.
    """
    start, maps, records = activations(model, input_ids), BlockMaps(model, input_ids), {}
    initial = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for step in range(record_at[-1] + 1):
        if step:
            optimizer.zero_grad()
            loss, _ = model(input_ids, labels=labels)
            (loss / labels.numel()).backward()
            optimizer.step()
        if step in record_at:
            measured = measure(activations(model, input_ids), start)
            records[step] = {**measured, "change/map": maps.change(), **spectral_norms(model, initial)}
    return records


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the least-squares slope of log2(value) against log2(size), or nan if a value is not finite and > 0."""
    if not all(math.isfinite(value) and value > 0 for value in values):
        return math.nan
    x = torch.tensor(sizes, dtype=torch.float64).log2()
    y = torch.tensor(values, dtype=torch.float64).log2()
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())


@dataclass(frozen=True)
class Gate:
    """Bound the slope of one quantity at one step to [low, high], as in a correct parameterization."""

    quantity: str
    step: int
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Return whether a slope passes; nan (a run that blew up) does not."""
        return self.low <= value <= self.high


# Bounds from slopes measured over eightfold width and sixteenfold depth; docs/parameterization.md shows them.
GATES: dict[str, tuple[Gate, ...]] = {
    "width": (
        *(Gate(f"size/{name}", 10, -0.3, 0.3) for name in ("embedding", "attention", "mlp", "residual", "logits")),
        *(Gate(f"change/{name}", 10, -0.3, 0.3) for name in ("embedding", "block", "residual", "logits")),
        # A spectral norm can stay constant while its direction turns away from the data, as with SOAP without blocks
        Gate("change/map", 10, -0.5, 0.3),
        *(Gate(f"{name}/hidden", 10, -0.25, 0.25) for name in ("spectral", "spectral_change")),
        Gate("spectral/hidden", 0, -0.1, 0.1),
        # At initialisation, logits sum `width` independent terms and are divided by width
        Gate("size/logits", 0, -0.65, -0.35),
    ),
    # The final norm hides depth from the logits, so the stream and the blocks' shares of it are gated. At
    # initialisation the stream shrinks with depth (random branches add up to sqrt(L)/L), so it is not gated there.
    "depth": (
        Gate("size/residual", 10, -0.3, 0.1),
        Gate("change/residual", 10, -0.3, 0.1),
        Gate("change/block", 1, -1.25, -0.9),
        Gate("size/logits", 10, -0.05, 0.05),
        Gate("change/logits", 10, -0.05, 0.05),
        Gate("spectral_change/hidden", 10, -0.15, 0.15),
    ),
}
