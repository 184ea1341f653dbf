"""Assemble a model: parameterization, objective and precision meet here and nowhere else.

Training, loading and the coordinate check all build the same skeleton with `build_model`, and fill it in their own way.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.system.compilers import missing_c_compiler
from plumbline.model.attention import attention_kind, block_sparse
from plumbline.model.blocks.kind import Block
from plumbline.model.linear_cross_entropy import compiled_losses_and_gradient
from plumbline.model.objectives.next_token import NextTokenConfig
from plumbline.model.objectives.objective import TrainedLM
from plumbline.model.parameterization.initialization import Gather, initialize, whole
from plumbline.model.parameterization.multipliers import multipliers
from plumbline.model.parameterization.rows import ParameterRow
from plumbline.model.parameterization.skeleton import NoInitialValues
from plumbline.model.quantization import float8
from plumbline.model.quantization.precision import apply_precision


def build_model(config: Config, construction: AbstractContextManager[object] | None = None) -> TrainedLM:
    """Return the model of a run with its objective and `precision`; its parameters are uninitialized.

    Args:
        config: the run.
        construction: context in which modules are made: a device, or one that shards parameters as they appear.
    """
    with construction or nullcontext(), NoInitialValues():
        forward = multipliers(config.model, config.parameterization)
        objective = config.objective.make(config.model, forward, config.run.seed)
        model = TrainedLM(config.model, forward, objective)
    apply_precision(model.model.layers, config.precision)
    return model


def _determinism_refusal(config: Config, device: torch.device) -> str | None:
    """Return why a device cannot repeat the steps of a run to the last bit, or None if nothing is known against it."""
    why = attention_kind(config.model).varies_on_gpu
    if not config.run.repeats or device.type != "cuda" or why is None:
        return None
    asked, without = (
        ("run.deterministic = true", "run.deterministic=false")
        if config.run.deterministic
        else (f"run.reproducible = {config.run.reproducible}", "run.reproducible=null")
    )
    return f"{asked}: model.attention = {config.model.attention} {why}: set {without}"


def _compiler_refusal(config: Config, device: torch.device) -> str | None:
    """Return why blocks cannot be compiled for a GPU, or None if they can or need not be."""
    if device.type != "cuda" or not compiles(config, device):
        return None
    why = attention_kind(config.model).gpu_compiler_refusal(config.model) or missing_c_compiler()
    if why is None:
        return None
    asked = "left out, and blocks are compiled on a GPU" if config.train.compile is None else "true"
    return f"train.compile is {asked}: {why}, or set train.compile=false"


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move every buffer of a model to a device, but leave its parameters where they are."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def without_objective(config: Config) -> Config:
    """Return the configuration with the plain next-token objective, which has no tensors of its own."""
    return config.model_copy(update={"objective": NextTokenConfig()})


def build_for_training(
    config: Config,
    rows: Sequence[ParameterRow],
    device: torch.device,
    weights: Mapping[str, Tensor] | None = None,
    construction: AbstractContextManager[object] | None = None,
    gather: Gather = whole,
    restored: bool = False,
) -> TrainedLM:
    """Return the initialized model of a run, ready to be trained on `device`, to which its buffers are not moved yet.

    Args:
        config: the run.
        rows: its parameterization table.
        device: where it will be trained.
        weights: by name, instead of those that the seed draws.
        construction: see `build_model`.
        gather: context in which a parameter that `construction` has sharded is whole and can be written.
        restored: all weights will be restored from a checkpoint, and none is drawn.

    Raises:
        ConfigError: precision.float8 needs a device with float8 and torchao installed; or the device cannot compute
            deterministically (run.deterministic); or its host has no compiler for compiled blocks.
    """
    reasons = (
        float8.refusal(config.precision, device, compiles(config, device)),
        _determinism_refusal(config, device),
        _compiler_refusal(config, device),
    )
    for reason in filter(None, reasons):
        raise ConfigError(reason)
    model = build_model(config, construction)
    given = {row.name for row in rows} if restored else (weights or {}).keys()
    initialize(model, rows, config.run.seed, gather, given)
    if weights is not None:
        parameters = dict(model.named_parameters())
        for name, weight in weights.items():
            with torch.no_grad(), gather(parameters[name]):
                parameters[name].copy_(weight)
    float8.compute_in_float8(model.model.layers, config.precision)
    if compiles(config, device):
        compile_model(model, exact_division=not config.precision.is_plain)
    model.model.block_masks = masks_in_blocks(config, device)
    return model


def compiles(config: Config, device: torch.device) -> bool:
    """Return whether the blocks of a run are compiled on a device."""
    if config.train.compile is None:
        served = (
            config.why_not_compiled is None and attention_kind(config.model).gpu_compiler_refusal(config.model) is None
        )
        return device.type == "cuda" and served
    return config.train.compile


def masks_in_blocks(config: Config, device: torch.device) -> bool:
    """Return whether a run's text uses FlexAttention with block masks, which needs compiled blocks."""
    served = attention_kind(config.model).serves_slots and block_sparse.refusal(config.model) is None
    asked = config.train.block_masks and config.deepspeed.precision == "bf16"
    return asked and served and device.type == "cuda" and compiles(config, device)


def blocks_of(model: nn.Module) -> list[Block]:
    """Return all blocks of a model, including those of its objective."""
    return [module for module in model.modules() if isinstance(module, Block)]


def compile_model(model: TrainedLM, exact_division: bool) -> None:
    """Compile every block and the loss of a chunk of logits.

    Each shape is compiled separately, so that the shape of an evaluation's batch does not affect training's graph.

    Only `forward` is compiled, so that the hooks of ZeRO-3 run outside the graph and do not break it.

    Args:
        model: to compile.
        exact_division: divide as uncompiled code does. Triton's own division may be off by a bit, and a value rounded
            to a grid may then fall on another grid point than in evaluation, which is not compiled.
    """
    from torch._inductor import config  # loads slowly, and most processes compile nothing

    block_sparse.permit_graphs()
    config.eager_numerics.division_rounding = exact_division  # process-wide, so set for each run
    for block in blocks_of(model):
        setattr(block, "forward", torch.compile(block.forward, dynamic=False))  # noqa: B010 - a method, to mypy
    model.lm_head.on_chunk = compiled_losses_and_gradient()
