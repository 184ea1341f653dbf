"""Save a quantized model as a Hugging Face folder in the compressed-tensors format, for transformers and vLLM.

The folder appears under its name only if transformers, after reloading it, computes what `--output` measures. A run is
rounded first and then exported, factors and all.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.data.disk import naming_full_disk
from plumbline.data.tokenizers import copy_tokenizer
from plumbline.data.workspace import check_folder, new_folder
from plumbline.launcher.runtime.export.hugging_face import (
    EXPORT,
    check_exportable,
    export,
    limit_length,
    note_for_older_readers,
)
from plumbline.launcher.runtime.export.report import ExportError
from plumbline.launcher.runtime.export.verify import check_tokens
from plumbline.launcher.runtime.models.open import LoadedModel, native_classes, quiet_transformers
from plumbline.launcher.runtime.system.log import LOG
from plumbline.model.decoder import CausalLM
from plumbline.model.export.fold import Weights
from plumbline.model.export.targets import AUTO, TARGETS, to_hugging_face
from plumbline.model.quantization.formats import Integer
from plumbline.model.quantization.layers import QuantizedLinear, replace_linears
from plumbline.model.quantization.post_training.apply import check_recipe, quantize_model
from plumbline.model.quantization.post_training.calibration import Sample
from plumbline.model.quantization.post_training.method import on_grid
from plumbline.model.quantization.post_training.recipes import Recipe
from plumbline.model.quantization.quantizer import Grid, Quantizer

# Allowed max |logit difference| / max |logit|. With inputs rounded to the same scales, a value halfway between two
# codes may still round the other way. Integers with a scale for each token have other scales there: absmax / 127.5
EXACT, SAME_SCALES, OTHER_SCALES = 1e-5, 1e-3, 0.05
SERVED_BITS = (4, 8)
"""Bits of packed weights that vLLM's source (CompressedTensorsWNA16) supports."""
CONV1D = "gpt2"
"""The stock target whose class is made of Conv1D layers."""


@dataclass(frozen=True)
class SaveReport:
    """Describe what was written and how it compares."""

    folder: str
    recipe: str
    architecture: str
    format: str
    """Name of the format of compressed-tensors."""
    relative_error: float
    """max |logit difference| / max |logit| of the reloaded folder against the model that was measured, fp32, with
    inputs left as they are."""
    rounded_error: float
    """The same error with inputs rounded, if the recipe rounds them."""
    file_bytes: int
    """Bytes of the weights in the folder."""
    cautions: tuple[str, ...] = ()
    """Warnings of the export that it was made of, see `ExportReport.cautions`."""

    def __str__(self) -> str:
        """Return the report in two lines."""
        return (
            f"{self.folder}: {self.architecture}, {self.recipe}, {self.format}, {self.file_bytes:,} bytes of weights\n"
            f"reloaded with transformers: logits within {self.relative_error:.1e} (allowed {EXACT:.0e}), with inputs "
            f"as the recipe has them within {self.rounded_error:.1e}"
        )


def save_quantized(model: LoadedModel, recipe: Recipe, samples: Sequence[Sample], output: Path) -> SaveReport:
    """Quantize and write to `output`.

    Args:
        model: a model of a run or a Hugging Face folder; it is rounded in place, on the CPU.
        recipe: a recipe for weights only, or also for inputs with per-token or static scales.
        samples: calibration text, token ids [B, T] or a batch each.
        output: a folder that does not exist.

    Raises:
        ValueError: the folder exists, the format cannot hold the recipe, or no stock class computes the model.
        ExportError: the reloaded folder computes something else.
        FullDiskError: no space is left on the device.
    """
    scheme, name = check_savable(model, recipe, len(samples), output)
    if name == "pack-quantized" and recipe.weights is not None and recipe.weights.numbers.bits not in SERVED_BITS:
        LOG.warning(
            f"recipe {recipe.name}: transformers reads packed integers of {recipe.weights.numbers.bits} bits; vLLM's "
            "source takes those of 4 and 8 alone"
        )
    with naming_full_disk(output, "choose another --save"), new_folder(output, EXPORT) as staging:
        stock: Any = model.module.float().cpu()
        quantize_model(stock, recipe, samples)
        cautions: tuple[str, ...] = ()
        if isinstance(stock, CausalLM):
            stock, cautions = _as_stock(model, stock, recipe, staging / "plain")
        grids = _grids(stock)
        with_inputs, _ = _both_logits(stock, _leave_inputs)
        expected = with_inputs, model.logits({"input_ids": check_tokens(stock.config)})  # as --output measures it
        _write(stock, grids, scheme, name, staging)
        if model.tokenizer_path is not None:
            copy_tokenizer(model.tokenizer_path, staging)
            if isinstance(model.module, CausalLM):
                limit_length(staging, model.module.config.max_position_embeddings)
        rounded, plain = _verify(staging, expected)
        _check_reloaded(plain, rounded, recipe, name, output)
        size = sum(file.stat().st_size for file in staging.glob("*.safetensors"))
        _check_free(output)  # again, since quantizing may have taken hours
    return SaveReport(str(output), recipe.name, type(stock).__name__, name, plain, rounded, size, cautions)


def check_savable(model: LoadedModel, recipe: Recipe, samples: int, output: Path) -> tuple[Any, str]:
    """Return the QuantizationScheme of a recipe, and the name of its storage format.

    Args:
        model: what is to be saved; its weights are not needed.
        recipe: how it is to be rounded.
        samples: number of samples of calibration text.
        output: where it is to go.

    Raises:
        ValueError: the folder exists, the format cannot hold the recipe, the recipe does not fit the model, or no stock
            class that the format knows computes the model.
    """
    _check_free(output)
    with quiet_transformers():  # it imports torchao
        scheme = _scheme(recipe)
    check_recipe(model.module, recipe, samples)
    if isinstance(model.module, CausalLM):
        target = check_exportable(model, AUTO)
        own_code, has_conv1d = bool(TARGETS[target].code), target == CONV1D
    else:
        own_code = isinstance(model.module, native_classes()[1])
        has_conv1d = any(type(module).__name__ == "Conv1D" for module in model.module.modules())
    if own_code:
        raise ValueError(
            f"{model.source}: no stock class computes this model, and the format is for stock classes; "
            "measure it with --output, or export it unquantized"
        )
    if has_conv1d:
        raise ValueError(
            f"{model.source}: its class in transformers is made of Conv1D layers, which the format does not know; "
            "measure it with --output, or train another model.family"
        )
    return scheme


def _scheme(recipe: Recipe) -> tuple[Any, str]:
    """Return the QuantizationScheme of a recipe, and the name of its storage format.

    Raises:
        ValueError: compressed-tensors cannot express it.
    """
    try:
        from compressed_tensors.quantization import QuantizationScheme
    except ImportError as error:
        raise ValueError("--save needs compressed-tensors: pip install -e '.[quantize]'") from error
    weights, inputs = recipe.weights, recipe.activations
    problems = [
        (weights is None, "it does not round weights"),
        (recipe.keys is not None or recipe.values is not None, "keys and values are rounded by whoever serves it"),
        (weights is not None and weights.scales not in ("fp32", "fp16"), "scales of few bits"),
        (
            weights is not None and not weights.symmetric,
            "zero points of weights, which transformers does not read back",
        ),
        (weights is not None and not _is_storable(weights), "its weights are neither int2 to int8 nor e4m3"),
        (
            recipe.smooth is not None or recipe.rounding.input_scale is not None,
            "its layers divide their inputs, which no stock class does",
        ),
        (bool(recipe.inputs), "the inputs of all layers have to be rounded alike"),
        (
            inputs is not None and not (_is_static(recipe, inputs) or _is_by_token(inputs)),
            "inputs have to be static of granularity tensor, or of granularity token with symmetric fp32 scales "
            "by absmax",
        ),
        (
            inputs is not None and (weights is None or inputs.format != weights.format or inputs.numbers.bits != 8),
            "its inputs are not of the 8 bits of its weights",
        ),
    ]
    if reasons := [reason for wrong, reason in problems if wrong]:
        raise ValueError(
            f"recipe {recipe.name} cannot be saved: {reasons[0]}; try gptq-w4-g128, rtn-w8, w8a8-token, w8a8-static or "
            "fp8-e4m3-row"
        )
    assert weights is not None, "asked above"
    integers = isinstance(weights.numbers, Integer)
    name = "float-quantized" if not integers else "pack-quantized" if inputs is None else "int-quantized"
    scheme = QuantizationScheme(
        targets=["Linear"],
        # One scale for a whole weight is written for each row, since rows of a run may have factors of their own
        weights=_arguments(weights if weights.group_size else weights.model_copy(update={"granularity": "channel"})),
        input_activations=None if inputs is None else _arguments(inputs, dynamic=not recipe.static),
    )
    return scheme, name


def _is_storable(weights: Quantizer) -> bool:
    return (isinstance(weights.numbers, Integer) and weights.numbers.bits <= 8) or weights.format == "e4m3"


def _is_static(recipe: Recipe, inputs: Quantizer) -> bool:
    return recipe.static and inputs.granularity == "tensor"


def _is_by_token(inputs: Quantizer) -> bool:
    kind = (inputs.granularity, inputs.range, inputs.scales)
    return inputs.symmetric and kind == ("token", "absmax", "fp32")


def _arguments(quantizer: Quantizer, dynamic: bool = False) -> Any:
    from compressed_tensors.quantization import QuantizationArgs

    return QuantizationArgs(
        num_bits=quantizer.numbers.bits,
        type="int" if isinstance(quantizer.numbers, Integer) else "float",
        symmetric=quantizer.symmetric,
        strategy=quantizer.granularity,
        group_size=quantizer.group_size,
        dynamic=dynamic,
    )


@torch.no_grad()
def _as_stock(model: LoadedModel, ours: CausalLM, recipe: Recipe, folder: Path) -> tuple[Any, tuple[str, ...]]:
    """Return a rounded run as its stock class, layers and grids included, and the cautions of the export.

    A stock class holds a run's factors in its rows, and may have them in another order. So an export of matrices that
    hold the scale of each weight gives the scale of each weight in the class.

    Args:
        model: the run.
        ours: its module, rounded by the recipe.
        recipe: the recipe.
        folder: scratch space.

    Raises:
        ExportError: the class computes something else than the run with its weights rounded.
    """
    quantizer = recipe.weights
    assert quantizer is not None, "the format holds rounded weights only"
    layers = {name: layer for name, layer in ours.named_modules() if isinstance(layer, QuantizedLinear)}
    inputs = {name: layer.activations for name, layer in layers.items()}
    ours.apply(_leave_inputs)  # whose last bits differ in another class, and with them what is rounded
    cautions = export(replace(model, module=ours), folder, AUTO).cautions
    stock = _opened(folder)
    shutil.rmtree(folder)

    weights: Weights = dict(ours.named_parameters())
    for name, layer in layers.items():
        assert layer.grid is not None, "the recipe rounds weights"
        view, _ = quantizer.blocked(layer.weight, "weights")
        weights[f"{name}.weight"] = layer.grid.scale.expand(view.shape).reshape(layer.weight.shape)
    _, scales = to_hugging_face(AUTO, ours.config, ours.multipliers, weights)
    for name in layers:
        if f"{name}.weight" not in scales:
            continue  # the class has its rows in another layer that reads the same input
        linear = stock.get_submodule(name)
        scale = quantizer.blocked(scales[f"{name}.weight"], "weights")[0][..., :1]
        grid = Grid(quantizer.numbers, scale.where(scale != 0, 1.0))  # a gain of 0 leaves only zeros, on any grid
        linear.weight.data, _ = on_grid(linear.weight, grid, quantizer)
        rounded = QuantizedLinear(linear, None, inputs[name], layers[name].limits)
        rounded.grid = grid
        stock.set_submodule(name, rounded)
    return stock, cautions


def _opened(folder: Path) -> Any:
    """Open the folder as a user of transformers does, in fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()


@torch.no_grad()
def _logits(stock: Any) -> Tensor:
    """Return the logits on the tokens of all checks."""
    logits: Tensor = stock(input_ids=check_tokens(stock.config)).logits
    return logits


def _grids(stock: Any) -> dict[str, dict[str, Grid]]:
    """Return, for each rounded layer by name, the weight's grid, and the input's if it is static."""
    found: dict[str, dict[str, Grid]] = {}
    for name, layer in stock.named_modules():
        if isinstance(layer, QuantizedLinear) and layer.grid is not None:
            found[name] = {"weight": layer.grid}
            if layer.activations is not None and layer.limits is not None:
                found[name]["input"] = layer.activations.grid_between(layer.limits, layer.limits.largest)
    return found


def _write(stock: Any, grids: Mapping[str, Mapping[str, Grid]], scheme: Any, name: str, folder: Path) -> None:
    """Hand grids to compressed-tensors, let it pack the weights, and let transformers write the folder."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config

    def plain(_: str, layer: nn.Linear) -> nn.Module:
        linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        linear.weight, linear.bias = layer.weight, layer.bias
        return linear

    replace_linears(stock, plain)
    linears = [layer for layer, module in stock.named_modules() if isinstance(module, nn.Linear)]
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=name,
        ignore=[layer for layer in linears if layer not in grids],
        quantization_status=QuantizationStatus.FROZEN,
    )
    with quiet_transformers():
        apply_quantization_config(stock, config)
        for layer, own in grids.items():
            for site, grid in own.items():
                _hand_over(grid, stock.get_submodule(layer), site)
        compressor = ModelCompressor.from_pretrained_model(stock, quantization_format=name)
        compressor.compress_model(stock)
        stock.save_pretrained(folder)
    compressor.update_config(str(folder))
    note_for_older_readers(folder)


def _hand_over(grid: Grid, layer: nn.Module, site: str) -> None:
    """Fill in compressed-tensors' parameters; its codes begin at -2^(bits - 1), ours with a zero point at 0."""
    values = {"scale": grid.scale}
    if grid.zero is not None:
        values["zero_point"] = grid.zero - 2 ** (grid.format.bits - 1)
    for key, value in values.items():
        parameter = layer.get_parameter(f"{site}_{key}")
        rows = value.reshape(-1, *parameter.shape[1:])
        parameter.data = rows.expand(parameter.shape).to(parameter.dtype).contiguous()


def _both_logits(stock: Any, leave_inputs: Callable[[nn.Module], object]) -> tuple[Tensor, Tensor]:
    """Return the model's logits, and those after `leave_inputs` disabled its rounding of inputs."""
    rounded = _logits(stock)
    stock.apply(leave_inputs)
    return rounded, _logits(stock)


def _leave_inputs(module: nn.Module) -> None:
    if isinstance(module, QuantizedLinear):
        module.activations = None


def _verify(folder: Path, expected: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Return the largest |logit difference| over the largest |logit| of the folder: as it is, and with inputs left."""
    from compressed_tensors.quantization import disable_quantization

    with quiet_transformers():
        found = _both_logits(_opened(folder), disable_quantization)
    rounded, plain = (
        float((theirs - ours).abs().max() / ours.abs().max()) for theirs, ours in zip(found, expected, strict=True)
    )
    return rounded, plain


def _check_reloaded(plain: float, rounded: float, recipe: Recipe, name: str, output: Path) -> None:
    """Refuse a folder that computes something else, with or without the recipe's rounding of inputs.

    Args:
        plain: error of the logits with inputs as they are, as a share of the largest.
        rounded: the same with inputs as the recipe has them.
        recipe: by which the model was quantized.
        name: of the format.
        output: where the folder was to go.

    Raises:
        ExportError: one of the two is larger than the format explains.
    """
    rounds_alike = OTHER_SCALES if name == "int-quantized" and not recipe.static else SAME_SCALES
    allowed = EXACT if recipe.activations is None else rounds_alike
    for error, tolerance in ((plain, EXACT), (rounded, allowed)):
        if not error <= tolerance:
            raise ExportError(
                f"--save {output}: reloaded, logits differ by {error:.1e} of the largest (allowed "
                f"{tolerance:.0e}); nothing was saved"
            )


def _check_free(output: Path) -> None:
    if os.path.lexists(output):
        raise ValueError(f"--save {output}: exists; choose another folder")
    check_folder(output, output.parent, "--save")
