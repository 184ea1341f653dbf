"""Run calibration text through a model, one block at a time, and collect statistics of the layers' inputs.

Each block runs in its current form, with all layers before it already rounded. Only the hidden states before one block,
and sums over them, are kept.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.model.decoder import CausalLM
from plumbline.model.quantization.quantizer import Limits, Quantizer
from plumbline.model.stock_inputs import stock_inputs

Sample = Tensor | Mapping[str, Any]
"""Token ids [B, T]; or a batch with them, which a model that masks documents needs to know where they begin."""
PLACES = ("model.layers", "transformer.h", "gpt_neox.layers", "model.decoder.layers")
KEPT = 0.9
"""What a running mean of limits keeps at each sequence."""
Arguments = tuple[Tensor, tuple[Any, ...], dict[str, Any]]  # hidden states, and the rest of a block's arguments


def decoder_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the list of blocks, and its name, of a CausalLM or a Hugging Face causal language model.

    Raises:
        ValueError: they are in none of the usual places.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    for place in PLACES:
        if place in lists:
            return place, lists[place]
    raise ValueError(f"{type(model).__name__}: its blocks are in none of {', '.join(PLACES)}")


def unfold_conv1d(model: nn.Module) -> None:
    """Replace every Conv1D of transformers (GPT-2), whose weight is [in, out], by an nn.Linear.

    Parameters keep their names.
    """
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Conv1D":
            weight = module.get_parameter("weight")
            linear = nn.Linear(weight.size(0), weight.size(1), device="meta")
            linear.weight = nn.Parameter(weight.detach().T.contiguous(), weight.requires_grad)
            linear.bias = module.get_parameter("bias")
            model.set_submodule(name, linear.train(module.training))


class InputSums:
    """Accumulate over the inputs x of a group of layers: max |x| and mean |x|, [in] each, and the sum of x x^T."""

    def __init__(self, width: int, device: torch.device, with_products: bool) -> None:
        self.with_products = with_products
        self.tokens = 0
        self.largest = torch.zeros(width, device=device)
        self.total = torch.zeros(width, dtype=torch.float64, device=device)
        size = width if with_products else 0
        self.products = torch.zeros(size, size, dtype=torch.float64, device=device)

    def add(self, x: Tensor) -> None:
        """Add inputs x [..., in]."""
        rows = x.detach().flatten(0, -2).float()
        sizes = rows.abs()
        self.tokens += len(rows)
        self.largest = torch.maximum(self.largest, sizes.amax(0))
        self.total += sizes.sum(0)
        if self.with_products:
            self.products += rows.T @ rows

    @property
    def mean_size(self) -> Tensor:
        """Return mean |x|, [in]."""
        return self.total / self.tokens


class CalibrationText:
    """Hold text on its way through a model, at the input of the current block."""

    def __init__(self, model: nn.Module, samples: Sequence[Sample]) -> None:
        """Start at the first block.

        Args:
            model: in evaluation mode.
            samples: each an array or a batch.
        """
        self.model, (_, self.blocks) = model, decoder_blocks(model)
        self.samples = samples
        self.number = 0
        self.sequences = 0  # of the sample that runs through the block
        self.calls = [self._arguments(sample) for sample in samples]
        self.hidden = [call[0][0] for call in self.calls]

    def groups(self) -> list[dict[str, nn.Linear]]:
        """Return the block's linear layers by name, grouped by shared input, in the order in which they run.

        Raises:
            ValueError: a layer does not run.
        """
        block = self.blocks[self.number]
        linears = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
        groups: list[tuple[Tensor, dict[str, nn.Linear]]] = []

        def note(name: str, layer: nn.Linear, x: Tensor) -> None:
            group = next((group for other, group in groups if other is x), None)
            if group is None:
                groups.append((x, {name: layer}))
            else:
                group[name] = layer

        self._run({layer: partial(note, name, layer) for name, layer in linears.items()}, self.samples[:1])
        if idle := linears.keys() - {name for _, group in groups for name in group}:
            raise ValueError(f"block {self.number}: {', '.join(sorted(idle))} does not run on the calibration text")
        return [group for _, group in groups]

    def sums(self, layer: nn.Linear, with_products: bool) -> InputSums:
        """Return the sums over the inputs of a layer of the block."""
        sums = InputSums(layer.in_features, layer.weight.device, with_products)
        self._run({layer: sums.add}, self.samples)
        return sums

    def limits(
        self, layer: nn.Linear, scale: Tensor | None, quantizers: Collection[Quantizer]
    ) -> dict[Quantizer, Limits]:
        """Return static limits of a layer's input divided by `scale`, for each quantizer.

        They are the extremes over all sequences, or, of percentiles, a running mean over sequences, as in the code of
        Bondarenko et al. (arXiv 2306.12929). Neither depends on which sequences are in one sample.
        """
        limits: dict[Quantizer, Limits] = {}

        def add(x: Tensor) -> None:
            x = x if scale is None else x / scale.to(x.dtype)
            for sequence, quantizer in product(self.by_sequence(x).split(1), quantizers):
                new = quantizer.limits(sequence, "activations")
                if (known := limits.get(quantizer)) is None:
                    limits[quantizer] = new
                elif quantizer.range == "percentile":
                    limits[quantizer] = known.moved(new, 1 - KEPT)
                else:
                    limits[quantizer] = known.widened(new)

        self._run({layer: add}, self.samples)
        return limits

    def by_sequence(self, x: Tensor) -> Tensor:
        """Return a layer's input as [B, T, in], also if its block runs all tokens of a sample as rows, as OPT's."""
        return x if x.dim() > 2 else x.unflatten(0, (self.sequences, -1))

    def run_block(self) -> None:
        """Run the text through the block in its current form."""
        self.hidden = list(self._run({}, self.samples))

    def advance(self) -> None:
        """Move on to the next block."""
        if self.number == 0:
            # What later blocks get from the first one (value residual) is now rounded, too
            self.calls = [self._arguments(sample) for sample in self.samples]
        self.number += 1

    def _run(self, hooks: dict[nn.Linear, Callable[[Tensor], None]], samples: Sequence[Sample]) -> list[Tensor]:
        """Return the block's outputs for `samples`; hooks receive the inputs of layers."""
        handles = [
            layer.register_forward_pre_hook(lambda _, args, see=see: see(args[0])) for layer, see in hooks.items()
        ]
        try:
            outputs = []
            for hidden, calls in zip(self.hidden[: len(samples)], self.calls, strict=False):
                _, arguments, named = calls[self.number]
                self.sequences = len(hidden)
                output = self.blocks[self.number](hidden, *arguments, **named)
                outputs.append(output if isinstance(output, Tensor) else output[0])
            return outputs
        finally:
            for handle in handles:
                handle.remove()

    def _arguments(self, sample: Sample) -> list[Arguments]:
        """Return the arguments with which each block is called for a sample; the model runs up to the last block."""
        calls: list[Arguments] = []

        def catch(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            named = dict(named)
            hidden, *rest = arguments if arguments else (named.pop("hidden_states"),)
            # Later blocks' hidden states would come from unrounded blocks: only those of the first are of use
            calls.append((hidden if not calls else hidden[:0], tuple(rest), named))
            if len(calls) == len(self.blocks):
                raise _AllCaught

        handles = [block.register_forward_pre_hook(catch, with_kwargs=True) for block in self.blocks]
        try:
            batch = {"input_ids": sample} if isinstance(sample, Tensor) else sample
            batch = {name: tensor.to(next(self.model.parameters()).device) for name, tensor in batch.items()}
            if isinstance(self.model, CausalLM):
                self.model.model(batch["input_ids"], batch.get("document_ids"), batch.get("positions"))
            else:
                self.model(**{**stock_inputs(self.model, batch), "use_cache": False})
        except _AllCaught:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return calls


class _AllCaught(Exception):  # noqa: N818 - not an error
    """Stop a forward pass before the last block runs."""
