"""Observe the tensors of one forward pass of a model with hooks that change nothing.

Keys are KIND/QUANTITY/PLACE. A place is a block's number with leading zeros ("03"), or "head" for the stream that
leaves the last block; quantities that exist once have no place. docs/diagnostics.md has the table.

    stream/...        into each block, and out of the last
    branch/ratio_...  what attention and MLP add to the stream, against the stream before (no skip: what they put there)
    gemm_in/kurt_...  input of the query, key and value projections, of down_proj, and the block's output
    attn_in/kurt_...  queries, keys and values as attention gets them: normalised and rotated, all heads side by side
    attn/...          what each softmax over keys does
    emb/rms           output of the embedding
    logits/... head/rms
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plumbline.model.attention.softmax import explicit_attention
from plumbline.model.decoder import CausalLM
from plumbline.model.diagnostics import statistics
from plumbline.model.diagnostics.statistics import STATISTICS, Statistics, Sums, stream_sums
from plumbline.model.linear_cross_entropy import LOGITS_AT_ONCE

Reduce = Callable[[Tensor], Tensor]  # a flat fp64 tensor -> its reduction over all ranks


class Observation:
    """Hold sums of observations; call `total` to add them up over ranks, then `record`.

    Args:
        real: which tokens count, [B, T]; None: all.
    """

    def __init__(self, real: Tensor | None = None) -> None:
        self.real = real
        # As indices, since the host waits for a GPU at each use of a mask
        self._places = None if real is None else real.nonzero(as_tuple=True)
        self.sums: dict[tuple[str, str], Sums] = {}  # (kind, rest of the key) -> sums

    def add(self, kind: str, rest: str, sums: Sums) -> None:
        """Add sums over more tokens."""
        known = self.sums.setdefault((kind, rest), {})
        for name, value in sums.items():
            if name not in known:
                known[name] = value
            else:
                known[name] = torch.maximum(known[name], value) if _is_maximum(name) else known[name] + value

    def tokens(self, x: Tensor) -> Tensor:
        """Return the tokens of x [B, T, D] that count, [..., D]."""
        return x if self._places is None else x[self._places]

    def total(self, add: Reduce, largest: Reduce) -> None:
        """Replace the sums by those over all ranks, on the host; keys agree since all ranks have the same model."""
        for reduce, maxima in ((add, False), (largest, True)):
            places = [(sums, name) for sums in self.sums.values() for name in sums if _is_maximum(name) is maxima]
            if places:
                parts = [sums[name] for sums, name in places]
                reduced = reduce(torch.cat([part.flatten() for part in parts])).cpu()  # in one reduction
                values = reduced.split([part.numel() for part in parts])
                for (sums, name), part, value in zip(places, parts, values, strict=True):
                    sums[name] = value.view(part.shape)

    def record(self) -> Statistics:
        """Return the statistics by their keys, sorted."""
        record: Statistics = {}
        for (kind, rest), sums in self.sums.items():
            measured = STATISTICS[kind]({name: value.cpu() for name, value in sums.items()})
            record |= {_key(kind, name, rest): value for name, value in measured.items()}
        return dict(sorted(record.items()))


def _is_maximum(name: str) -> bool:
    return name.startswith("max_")


def _key(kind: str, name: str, rest: str) -> str:
    """Return branch/ratio_attn/03 for branch, ratio, attn/03, and stream/rms/03 for stream, rms, 03."""
    if (kind, name) == ("logits", "rms"):
        return "head/rms"
    part, _, place = rest.rpartition("/")
    return "/".join(word for word in (kind, f"{name}_{part}" if part else name, place) if word)


@contextmanager
def observing(model: CausalLM, attention_stride: int, real: Tensor | None = None) -> Iterator[Observation]:
    """Observe `model` within a `with` block; compiled modules run uncompiled meanwhile.

    All logits are measured in chunks inside the head, which then returns only those of the first token. So the model
    must be called without labels, and its output is of no use.

    Args:
        model: under ZeRO, the module inside the engine; call the engine itself.
        attention_stride: measure attention for every `attention_stride`-th query.
        real: [B, T], on the model's device: the tokens that are no padding, which alone count; None: all.
    """
    observation = Observation(real)
    layers, hooks = model.model.layers, []
    tap = _AttentionTap(observation, attention_stride)
    for number, layer in enumerate(layers):
        hooks += _watch_block(layer, layer_name(number, len(layers)), observation, tap)
    last: nn.Module = layers[len(layers) - 1]
    hooks.append(last.register_forward_hook(lambda _m, _x, y: observation.add("stream", "head", stream_sums(y, real))))
    embedding = model.model.embed_tokens
    hooks.append(embedding.register_forward_hook(_size_into(observation)))
    hooks.append(model.lm_head.register_forward_pre_hook(_logits_into(observation)))
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), tap:
            yield observation
    finally:
        for hook in hooks:
            hook.remove()


def layer_name(number: int, layers: int) -> str:
    """Return the block number with leading zeros, so that sorting by name sorts by depth."""
    return f"{number:0{max(2, len(str(layers - 1)))}d}"


def _watch_block(layer: nn.Module, place: str, observation: Observation, tap: "_AttentionTap") -> list[Any]:
    """Put hooks on one block: on its stream, its branches and the inputs of its matrices, if it has them."""
    stream: list[Tensor] = []  # at the block's input, and after attention was added

    def enter(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        tap.place = place
        stream[:] = [inputs[0]]
        observation.add("stream", place, stream_sums(inputs[0], observation.real))

    def leave(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        before, between, after = (observation.tokens(x) for x in (*stream, output))
        observation.add("gemm_in", f"block/{place}", statistics.gemm_sums(after))
        observation.add("branch", f"attn/{place}", statistics.branch_sums(before, between, _skip(layer, "attn")))
        observation.add("branch", f"mlp/{place}", statistics.branch_sums(between, after, _skip(layer, "mlp")))

    hooks: list[Any] = [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
    joins: Any = getattr(layer, "attn_residual", layer.self_attn)  # without a skip, attention's output is the stream
    hooks.append(joins.register_forward_hook(lambda _m, _x, y: stream.append(y)))
    modules = dict(layer.named_modules())
    qkv = next((modules[path] for name in "qkv" if (path := f"self_attn.{name}_proj") in modules), None)
    for name, module in (("qkv", qkv), ("mlp2", modules.get("mlp.down_proj"))):
        if module is not None:
            hooks.append(module.register_forward_pre_hook(_gemm_into(observation, f"{name}/{place}")))
    return hooks


def _skip(layer: nn.Module, branch: str) -> float:
    """Return the factor on the stream where a branch is added, or 0 if the branch replaces it."""
    residual: Any = getattr(layer, f"{branch}_residual", None)
    return 0.0 if residual is None else float(residual.skip)


class _AttentionTap(TorchFunctionMode):
    """Intercept every attention, fused or explicit, with its queries, keys, values, mask and scale."""

    def __init__(self, observation: Observation, stride: int) -> None:
        super().__init__()
        self.observation, self.stride = observation, stride
        self.place = ""

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Measure attention, and pass all calls on."""
        if function is F.scaled_dot_product_attention:
            self._measure_fused(*args, **(kwargs or {}))
        elif function is explicit_attention:
            self._measure_explicit(*args)
        return function(*args, **(kwargs or {}))

    def _measure_fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        **_options: Any,
    ) -> None:
        self._measure_inputs(query, key, value)
        sums = statistics.attention_sums(
            query, key, attn_mask, is_causal, scale, self.stride, real=self.observation.real
        )
        self.observation.add("attn", self.place, sums)

    def _measure_explicit(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        cap: float | None,
        sinks: Tensor | None,
        _dropout: float,
    ) -> None:
        self._measure_inputs(query, key, value)
        sums = statistics.attention_sums(
            query, key, mask, mask is None, scale, self.stride, cap, sinks, self.observation.real
        )
        self.observation.add("attn", self.place, sums)

    def _measure_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Measure queries, keys and values, [B, heads, T, head_dim] each."""
        for name, heads in (("q", query), ("k", key), ("v", value)):
            channels = heads.transpose(1, 2).flatten(2)  # (B, T, heads * head_dim)
            sums = statistics.gemm_sums(self.observation.tokens(channels))
            self.observation.add("attn_in", f"{name}/{self.place}", sums)


def _gemm_into(observation: Observation, rest: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    return lambda _m, inputs: observation.add("gemm_in", rest, statistics.gemm_sums(observation.tokens(inputs[0])))


def _size_into(observation: Observation) -> Callable[[nn.Module, Any, Tensor], None]:
    return lambda _m, _inputs, y: observation.add("emb", "", statistics.size_sums(observation.tokens(y)))


def _logits_into(observation: Observation) -> Callable[..., tuple[Any, ...]]:
    def measure(head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Measure inside the head's own forward, where ZeRO-3 has gathered its weight."""
        hidden, labels, z_loss = inputs
        flat = observation.tokens(hidden).flatten(0, -2)
        for chunk in flat.split(max(1, LOGITS_AT_ONCE // head.weight.size(0))):  # type: ignore[operator]
            observation.add("logits", "", statistics.logit_sums(head.forward(chunk, None, 0.0)))
        return hidden[:1, :1], labels, z_loss

    return measure
