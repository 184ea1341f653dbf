"""Save a quantized model as a Hugging Face folder in the compressed-tensors format, for transformers and vLLM.

The folder appears under its name only if transformers, after reloading it, computes what was measured.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.data.disk import naming_full_disk
from plumbline.data.tokenizers import copy_tokenizer
from plumbline.data.workspace import new_folder
from plumbline.launcher.runtime.export.hugging_face import EXPORT, export, limit_length, note_for_older_readers
from plumbline.launcher.runtime.export.report import ExportError
from plumbline.launcher.runtime.export.verify import check_tokens
from plumbline.launcher.runtime.models.open import LoadedModel, native_classes, quiet_transformers
from plumbline.launcher.runtime.system.log import LOG
from plumbline.model.decoder import CausalLM
from plumbline.model.quantization.formats import Integer
from plumbline.model.quantization.layers import QuantizedLinear, replace_linears
from plumbline.model.quantization.post_training.apply import check_recipe, quantize_model
from plumbline.model.quantization.post_training.calibration import Sample
from plumbline.model.quantization.post_training.recipes import Recipe
from plumbline.model.quantization.post_training.smooth import fold_input_scales
from plumbline.model.quantization.quantizer import Grid, Quantizer

# Allowed max |logit difference| / max |logit|. With inputs rounded to the same scales, a value halfway between two
# codes may still round the other way. Integers with a scale for each token have other scales there: absmax / 127.5
EXACT, SAME_SCALES, OTHER_SCALES = 1e-5, 1e-3, 0.05
SERVED_BITS = (4, 8)
"""Bits of packed weights that vLLM's source (CompressedTensorsWNA16) supports."""
MEASURED = 1e-2
"""Allowed change relative to the largest logit if a few weights lie halfway between two codes."""


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
        model: a model of a run or a Hugging Face folder.
        recipe: a recipe for weights only, or also for inputs with per-token or static scales.
        samples: calibration text, token ids [B, T] or a batch each.
        output: a folder that does not exist.

    Raises:
        ValueError: the folder exists, the format cannot hold the recipe, or no stock class computes the model.
        ExportError: the reloaded folder computes something else.
        FullDiskError: no space is left on the device.
    """
    scheme, name = check_savable(recipe, output)
    check_recipe(model.module, recipe, len(samples))
    if name == "pack-quantized" and recipe.weights is not None and recipe.weights.numbers.bits not in SERVED_BITS:
        LOG.warning(
            f"recipe {recipe.name}: transformers reads packed integers of {recipe.weights.numbers.bits} bits; vLLM's "
            "source takes those of 4 and 8 alone"
        )
    with naming_full_disk(output, "choose another --save"), new_folder(output, EXPORT) as staging:
        stock = _as_stock(model, staging / "plain")
        factors = _row_factors(model.module, stock, recipe) if isinstance(model.module, CausalLM) else None
        quantize_model(stock, recipe, samples, factors)
        if left := fold_input_scales(stock):
            raise ValueError(
                f"recipe {recipe.name}: {left[0]} and {len(left) - 1} more divide their inputs, which no stock class "
                "does; save a recipe of rtn or gptq"
            )
        grids = _grids(stock)
        expected = _both_logits(stock, _leave_inputs)
        if isinstance(model.module, CausalLM):
            _compare_with_measured(model.module, recipe, samples, expected[1])
        _write(stock, grids, scheme, name, staging)
        if model.tokenizer_path is not None:
            copy_tokenizer(model.tokenizer_path, staging)
            if isinstance(model.module, CausalLM):
                limit_length(staging, model.module.config.max_position_embeddings)
        rounded, plain = _verify(staging, expected)
        _check_reloaded(plain, rounded, recipe, name, output)
        size = sum(file.stat().st_size for file in staging.glob("*.safetensors"))
        _check_free(output)  # again, since quantizing may have taken hours
    return SaveReport(str(output), recipe.name, type(stock).__name__, name, plain, rounded, size)


def check_savable(recipe: Recipe, output: Path) -> tuple[Any, str]:
    """Return the QuantizationScheme of a recipe, and the name of its storage format.

    Raises:
        ValueError: the folder exists, or the format cannot hold the recipe.
    """
    _check_free(output)
    with quiet_transformers():  # it imports torchao
        return _scheme(recipe)


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
        weights=_arguments(weights),
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


def _as_stock(model: LoadedModel, folder: Path) -> Any:
    """Return the model as a stock transformers class in fp32 on the CPU; `folder` is used as scratch space.

    Raises:
        ValueError: no class can express it, or the format cannot store it.
    """
    ours = isinstance(model.module, CausalLM)
    if export(model, folder, "auto").own_code if ours else isinstance(model.module, native_classes()[1]):
        raise ValueError(
            f"{model.source}: no stock class computes this model, and the format is for stock classes; "
            "measure it with --output, or export it unquantized"
        )
    stock = _opened(folder) if ours else model.module.float().cpu()
    if ours:
        shutil.rmtree(folder)
    if any(type(module).__name__ == "Conv1D" for module in stock.modules()):
        raise ValueError(
            f"{model.source}: {type(stock).__name__} is made of Conv1D layers, which the format does not know; measure "
            "it with --output, or train another model.family"
        )
    return stock


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
        parameter.data = value.reshape(parameter.shape).to(parameter.dtype)


def _both_logits(stock: Any, leave_inputs: Callable[[nn.Module], object]) -> tuple[Tensor, Tensor]:
    """Return the model's logits, and those after `leave_inputs` disabled its rounding of inputs."""
    rounded = _logits(stock)
    stock.apply(leave_inputs)
    return rounded, _logits(stock)


@torch.no_grad()
def _row_factors(module: CausalLM, stock: Any, recipe: Recipe) -> dict[str, Tensor]:
    """Return by which factor of the run each weight of the stock class was multiplied, a number or one for each row.

    Args:
        module: a run's.
        stock: the same model as a stock class, with the run's factors folded into the weights.
        recipe: what is to be carried out on `stock`.

    Raises:
        ExportError: the recipe would make another model of `stock` than of `module`; nothing has been calibrated.
    """
    theirs, factors = dict(stock.named_modules()), {}
    for name, layer in module.model.layers.named_modules(prefix="model.layers"):
        folded = theirs.get(name)
        if not isinstance(layer, nn.Linear) or not isinstance(folded, nn.Linear):
            continue
        if isinstance(layer, QuantizedLinear) and layer.weights is not None:
            if recipe.rounding.needs_text:
                raise _other_model(recipe, f"{name} was rounded in training")
            continue
        if folded.weight.shape != layer.weight.shape:
            continue
        weight = layer.weight.float().cpu()
        largest = weight.abs().argmax(1, keepdim=True)  # of each row; the row may be 0
        factor = (folded.weight.gather(1, largest) / weight.gather(1, largest)).nan_to_num(1.0)
        if torch.allclose(folded.weight, weight * factor[0], rtol=EXACT, atol=0.0):
            factor = factor[0, 0]
        elif not torch.allclose(folded.weight, weight * factor, rtol=EXACT, atol=0.0):
            factor = folded.weight.norm() / weight.norm()  # rows in another order, as of Cohere's queries
        elif recipe.weights is not None and recipe.weights.granularity == "tensor":
            raise _other_model(recipe, f"the rows of {name} have factors of their own")
        factors[name] = factor.where(factor != 0, 1.0)  # by which the weight is divided; what a gain of 0 left stays 0
    return factors


def _other_model(recipe: Recipe, how: str) -> ExportError:
    return ExportError(
        f"--recipes {recipe.name}: carried out on the stock class it makes another model than the one that --output "
        f"measures ({how}), for that class holds factors and rounding of the run in its weights; nothing was saved. "
        "Export the run (export.py), and measure and save that folder"
    )


@torch.no_grad()
def _compare_with_measured(module: CausalLM, recipe: Recipe, samples: Sequence[Sample], expected: Tensor) -> None:
    """Refuse a recipe that gives the stock class a different function from the module that `measure` scores.

    Stock classes have the weights of a run that rounds them in training rounded already, and may have a run's factors
    where `_row_factors` does not find them.

    Args:
        module: a run's.
        recipe: as it was carried out on the stock class.
        samples: calibration text.
        expected: logits of the stock class on `check_tokens`, with inputs as they are.

    Raises:
        ExportError: the logits of the two differ.
    """
    measured = deepcopy(module).float().cpu()
    quantize_model(measured, recipe, samples)
    measured.apply(_leave_inputs)
    error = float((measured(check_tokens(module.config)) - expected).abs().max() / expected.abs().max())
    if not error <= MEASURED:
        raise _other_model(recipe, f"logits differ by {error:.1e} of the largest, allowed {MEASURED:.0e}")


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
    if output.exists():
        raise ValueError(f"--save {output}: exists; choose another folder")
