"""Quantize a whole trained model with a recipe, block by block."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.model.quantization.layers import QuantizedLinear
from plumbline.model.quantization.post_training.calibration import (
    CalibrationText,
    InputSums,
    Sample,
    decoder_blocks,
    unfold_conv1d,
)
from plumbline.model.quantization.post_training.hadamard import check_rotation, rotate
from plumbline.model.quantization.post_training.kv_cache import check_kv_cache, round_kv_cache
from plumbline.model.quantization.post_training.recipes import Recipe
from plumbline.model.quantization.post_training.report import LayerReport, Observer
from plumbline.model.quantization.post_training.smooth import kept_input_scales, smooth_scale
from plumbline.model.quantization.quantizer import Grid, Limits, Quantizer


@torch.no_grad()
def quantize_model(model: nn.Module, recipe: Recipe, samples: Sequence[Sample] = ()) -> list[LayerReport]:
    """Round a trained model with a recipe, in place, and leave it in evaluation mode.

    The linear layers of the blocks become `QuantizedLinear`, whose `weight` holds values of its `grid`. Embedding, head
    and norms stay. Layers are rounded in order, each for the inputs that the rounded layers before it produce. To try
    several recipes, give each a `copy.deepcopy` of the model.

    If the model was trained with rounding, the recipe gets its stored weights, and the model keeps its own rounding
    where the recipe has none.

    Args:
        model: a CausalLM, or a causal language model of transformers; GPT-2's Conv1D become nn.Linear.
        recipe: the recipe.
        samples: calibration text, token ids [B, T] or a batch each; reports are measured on it, too.

    Returns:
        A report for each rounded layer, in order; empty if the recipe only rounds keys and values.

    Raises:
        ValueError: the recipe needs text and there is none, or it cannot be applied to this model.
    """
    check_recipe(model, recipe, len(samples))
    model.eval()
    if recipe.rotate:
        rotate(model)
    unfold_conv1d(model)
    reports = _round_layers(model, recipe, samples) if recipe.rounds_layers else []
    if recipe.keys is not None or recipe.values is not None:
        round_kv_cache(model, recipe.keys, recipe.values)
    return reports


def check_recipe(model: nn.Module, recipe: Recipe, samples: int) -> None:
    """Refuse early what would fail later.

    Raises:
        ValueError: names the recipe and what does not fit.
    """
    if recipe.needs_samples and not samples:
        raise ValueError(f"recipe {recipe.name} needs calibration text: give samples, or a recipe without")
    try:
        if recipe.rotate:
            check_rotation(model)
        if recipe.keys is not None or recipe.values is not None:
            check_kv_cache(model, recipe.keys, recipe.values)
        place, blocks = decoder_blocks(model)
    except ValueError as error:
        raise ValueError(f"recipe {recipe.name}: {error}") from None
    told = getattr(getattr(model, "config", None), "quantization_config", None)
    if told is not None and (recipe.rounds_layers or recipe.rotate):
        raise ValueError(
            f"recipe {recipe.name}: the model is quantized already (quantization_config in its config.json); begin "
            "with the one that it was made of, or round keys and values alone, as kv8 does"
        )
    _refuse_experts(recipe, place, blocks)
    names = [name for name, _ in blocks.named_modules(prefix=place)]
    if recipe.inputs and not any(name.endswith(end) for name in names for end in recipe.inputs):
        raise ValueError(f"recipe {recipe.name}: no layer's name ends in {', '.join(recipe.inputs)}")
    for name, module in blocks.named_modules(prefix=place):
        _check_layer(recipe, name, module)


def _check_layer(recipe: Recipe, name: str, module: Any) -> None:
    """Refuse a layer that is rounded already, or whose inputs a recipe's groups do not divide."""
    if isinstance(module, QuantizedLinear) and module.grid is not None:
        raise ValueError(f"recipe {recipe.name}: {name} is rounded already; begin with the model as it was trained")
    if not isinstance(module, nn.Linear) and type(module).__name__ != "Conv1D":
        return
    width = module.in_features if isinstance(module, nn.Linear) else module.weight.size(0)
    for quantizer in (recipe.weights, recipe.input_quantizer(name)):
        size = None if quantizer is None else quantizer.group_size
        if size is not None and width % size:
            raise ValueError(f"recipe {recipe.name}: group_size = {size} does not divide the {width} inputs of {name}")


def _refuse_experts(recipe: Recipe, place: str, blocks: nn.ModuleList) -> None:
    """Refuse blocks with trained stacks of matrices (experts); convolutions do not count."""
    for name, module in blocks.named_modules(prefix=place):
        for key, parameter in module.named_parameters(recurse=False):
            stack = parameter.dim() > 2 and parameter.requires_grad and not isinstance(module, nn.Conv1d)
            if stack and recipe.rounds_layers:
                raise ValueError(
                    f"recipe {recipe.name}: {name}.{key} {list(parameter.shape)} is no linear layer, as experts of a "
                    "mixture are not, and would stay as it is; quantize a dense model, or round keys and values alone, "
                    "as kv8 does"
                )


def _round_layers(model: nn.Module, recipe: Recipe, samples: Sequence[Sample]) -> list[LayerReport]:
    place, blocks = decoder_blocks(model)
    text = CalibrationText(model, samples) if samples else None
    reports = []
    for number, block in enumerate(blocks):
        replaced = {}
        for group in _alone(block) if text is None else text.groups():
            for name, layer in _round_group(recipe, group, text).items():
                block.set_submodule(name, layer)
                replaced[name] = group[name], layer
        observers = {name: Observer(*layers, text) for name, layers in replaced.items()}
        if text is not None:
            text.run_block()
        kept = kept_input_scales(block)
        reports += [
            each.report(f"{place}.{number}.{name}", recipe.weights, kept.get(name)) for name, each in observers.items()
        ]
        if text is not None:
            text.advance()
    return reports


def _alone(block: nn.Module) -> list[dict[str, nn.Linear]]:
    return [{name: module} for name, module in block.named_modules() if isinstance(module, nn.Linear)]


def _round_group(
    recipe: Recipe, group: Mapping[str, nn.Linear], text: CalibrationText | None
) -> dict[str, QuantizedLinear]:
    """Return rounded replacements for layers that share an input."""
    first = next(iter(group.values()))
    sums = text.sums(first, with_products=recipe.rounding.needs_text) if text and recipe.needs_samples else None
    scale = None if sums is None else _input_scale(recipe, [layer.weight for layer in group.values()], sums)
    scale = None if scale is None else scale.to(first.weight.dtype)
    quantizers = {name: recipe.input_quantizer(name) for name in group}
    limits: dict[str, Limits] = {}
    if recipe.static and text is not None:
        by_quantizer = text.limits(first, scale, {each for each in quantizers.values() if each is not None})
        limits = {name: by_quantizer[quantizer] for name, quantizer in quantizers.items() if quantizer is not None}

    rounded = {}
    for name, layer in group.items():
        weights, activations = None, quantizers[name]
        if isinstance(layer, QuantizedLinear):  # the model was trained with rounding
            weights = layer.weights if recipe.weights is None else None
            activations = activations or layer.activations
        quantized = QuantizedLinear(layer, weights, activations, limits.get(name), scale)
        weight = layer.weight if scale is None else layer.weight * scale
        if recipe.weights is not None:
            weight, quantized.grid = _round_weight(recipe, recipe.weights, weight.float(), sums, scale)
        quantized.weight = nn.Parameter(weight.to(layer.weight.dtype), layer.weight.requires_grad)
        rounded[name] = quantized
    return rounded


def _input_scale(recipe: Recipe, weights: Sequence[Tensor], sums: InputSums) -> Tensor | None:
    weights = [weight.float() for weight in weights]
    if recipe.smooth is not None:
        return smooth_scale(weights, sums.largest, recipe.smooth)
    choose = recipe.rounding.input_scale
    if choose is None or recipe.weights is None:
        return None
    return choose(weights, recipe.weights, sums.mean_size, sums.products)


def _round_weight(
    recipe: Recipe, quantizer: Quantizer, weight: Tensor, sums: InputSums | None, scale: Tensor | None
) -> tuple[Tensor, Grid]:
    """Return the weight, after multiplication by the input scale, rounded to its grid."""
    products = None
    if sums is not None and recipe.rounding.needs_text:
        products = sums.products if scale is None else sums.products / scale.outer(scale)
    return recipe.rounding.round(weight, products, quantizer, recipe)
