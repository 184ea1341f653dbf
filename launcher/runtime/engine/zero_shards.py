"""Find weights and gradients where DeepSpeed's ZeRO keeps them; no other file knows where in a shard a tensor lies.

    stage 0     every rank has all parameters, and they are the master weights
    stage 1, 2  the tensors of a parameter group are concatenated in a flat fp32 buffer, which is cut into one shard of
                equal length for each rank; the model computes with whole tensors
    stage 3     each tensor is cut into one part of equal length for each rank, the last ones padded; a rank's parts of
                a sub-group are concatenated in a flat fp32 shard

deepspeed is imported inside functions, because importing it chooses the accelerator, which `process_group` prepares.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.engine.pieces import Piece, replicated
from plumbline.launcher.runtime.optim.optimizer import ALIGNED
from plumbline.launcher.runtime.optim.whole_matrices import MatrixPieces, WholeMatrixOptimizer
from plumbline.launcher.runtime.ranks.collectives import sum_over_ranks
from plumbline.launcher.runtime.ranks.world import World


def master_weights(engine: Any, groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Return this rank's shards of the fp32 master weights; at stage 0 the parameters.

    Args:
        engine: the DeepSpeed engine.
        groups: its optimizer's parameter groups.
    """
    if engine.zero_optimization_stage() == 3:  # its groups are empty between updates
        return list(engine.optimizer.fp32_partitioned_groups_flat)
    return [master for group in groups for master in group["params"]]


def refresh_weights(engine: Any) -> None:
    """Copy the master weights into the model's weights, rounded and gathered as DeepSpeed does after an update."""
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if stage in (1, 2):
        optimizer.update_lp_params()
    elif stage == 3:
        optimizer.checkpoint_event_prologue()  # releases what is gathered
        for index in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        optimizer.checkpoint_event_epilogue()  # gathers what DeepSpeed keeps gathered


def refuse_uneven(model: nn.Module) -> None:
    """Refuse tensors that are not aligned to 16 bytes where code compiled for another block assumes that they are.

    `group_settings` orders each group so that this does not happen. But a single rank at stage 3 reads all groups from
    one buffer; several ranks gather each tensor into memory of its own.

    Raises:
        ConfigError: a tensor is misaligned; on a GPU it would crash the process.
    """
    for name, parameter in model.named_parameters():
        held = getattr(parameter, "ds_tensor", parameter)
        if held.storage_offset() % math.gcd(held.numel(), ALIGNED):
            raise ConfigError(
                f"deepspeed.zero_stage = 3 on one GPU: {name} lies behind tensors of an odd size, where compiled "
                "blocks cannot read it; set deepspeed.zero_stage=1, or train.compile=false"
            )


def locate(engine: Any, name: str, parameter: nn.Parameter, groups: Sequence[Mapping[str, Any]], world: World) -> Piece:
    """Return where this rank keeps its part of a tensor.

    Args:
        engine: the DeepSpeed engine.
        name: of the tensor.
        parameter: the model's parameter, as ZeRO left it.
        groups: the optimizer's parameter groups.
        world: this process among all.
    """
    if hasattr(parameter, "ds_numel"):
        return _located_at_stage_3(engine.optimizer, name, parameter, world)
    if engine.zero_optimization_stage() == 0 or not parameter.requires_grad:
        return replicated(name, parameter)
    shape, mapping = tuple(parameter.shape), parameter._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:  # it is entirely in other ranks' shards
        return Piece(name, shape, groups[0]["params"][0].new_empty(0), 0, 0, 0, trained=True)
    inside, within = mapping.hp_fragment_address, mapping.lp_fragment_address
    shard = groups[mapping.param_group_index]["params"][0]
    return Piece(name, shape, shard, inside.start, within.start, inside.numel, trained=True)


def _located_at_stage_3(zero: Any, name: str, parameter: Any, world: World) -> Piece:
    """Return where this rank keeps its part of a tensor that is cut into equal parts, the last ones padded."""
    padded = parameter.ds_tensor.numel()
    start = min(world.rank * padded, parameter.ds_numel)
    length = min(padded, parameter.ds_numel - start)
    shard, offset = parameter.ds_tensor, 0
    if parameter.requires_grad:
        group, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
        shard = zero.fp32_partitioned_groups_flat[group]
    return Piece(name, tuple(parameter.ds_shape), shard, offset, start, length, parameter.requires_grad)


def is_whole(parameter: Any) -> bool:
    """Return whether every rank keeps a parameter whole between steps; at stage 3 only small, persistent ones."""
    return not hasattr(parameter, "ds_numel") or (parameter.ds_persist and parameter.numel() == parameter.ds_numel)


def whole_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the whole reduced gradient of a tensor, between backward and update; all ranks must call."""
    from deepspeed.utils import safe_get_full_grad

    gradient: Tensor = safe_get_full_grad(parameter)
    return gradient


def gradient_norms(zero: Any, groups: int, stage: int) -> list[Tensor]:
    """Return the norm of the whole gradient of each parameter group, between backward and update. Collective.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
        groups: number of groups.
        stage: ZeRO stage, 1 to 3.

    Returns:
        Scalars, not finite where the gradient is not.
    """
    if stage == 3:
        norms = zero._get_norm_groups()  # of sub-groups
        owners = [zero.sub_group_to_group_id[index] for index in range(len(norms))]
    elif hasattr(zero, "fp32_groups_gradient_flat_partition"):  # stage 1 in bf16
        shards = [torch.linalg.vector_norm(shard) for shard in zero.fp32_groups_gradient_flat_partition]
        norms, owners = list(sum_over_ranks(torch.stack(shards) ** 2).sqrt()), list(range(groups))
    else:
        of_group = zero.complete_grad_norm_calculation_for_cpu_offload if zero.cpu_offload else None
        norms = [
            of_group(parameters) if of_group else zero.get_grad_norm_direct(zero.averaged_gradients[index], parameters)
            for index, parameters in enumerate(zero.params_in_partition)
        ]
        owners = list(range(groups))
    squares = torch.zeros(groups)
    for norm, owner in zip(norms, owners, strict=True):
        squares[owner] += math.nan if norm < 0 else float(norm) ** 2  # -1 is DeepSpeed's mark for not finite
    return list(squares.sqrt())


def locate_matrices(
    optimizer: WholeMatrixOptimizer, zero: Any, stage: int, world: World
) -> dict[Tensor, list[MatrixPieces]]:
    """Find the matrices of an optimizer in the flat shards that DeepSpeed made of its groups.

    Args:
        optimizer: created before DeepSpeed, which has since replaced its groups.
        zero: DeepSpeed's ZeRO optimizer.
        stage: ZeRO stage, 1 to 3.
        world: this process among all.

    Returns:
        This rank's flat shards, and the matrices in each.

    Raises:
        RuntimeError: a shard does not hold what it should.
    """
    shards: list[tuple[Tensor, list[nn.Parameter]]]
    if stage == 3:
        ours = {id(parameter) for matrices in optimizer.matrices for parameter in matrices}
        sub_groups = zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)
        shards = [(shard, parameters) for shard, parameters in sub_groups if id(parameters[0]) in ours]
    else:
        groups = zip(optimizer.param_groups, optimizer.matrices, strict=True)
        shards = [(group["params"][0], parameters) for group, parameters in groups]
    located = {}
    for shard, parameters in shards:
        shapes = [tuple(getattr(parameter, "ds_shape", parameter.shape)) for parameter in parameters]
        pieces = pieces_by_tensor(shapes, world.size) if stage == 3 else pieces_by_group(shapes, shard, world.size)
        located[shard] = list(pieces)
        for parameter, matrix in zip(parameters, located[shard], strict=True):
            _verify(shard, parameter, matrix, world.rank)
    return located


def pieces_by_group(shapes: Sequence[tuple[int, ...]], shard: Tensor, ranks: int) -> Iterator[MatrixPieces]:
    """Yield where stages 1 and 2 keep the matrices of a group, whose shards all have the length of `shard`."""
    offset, size = 0, shard.numel()
    for shape in shapes:
        bounds = [min(max(edge * size, offset), offset + math.prod(shape)) for edge in range(ranks + 1)]
        starts = tuple(before - rank * size for rank, before in enumerate(bounds[:-1]))
        yield MatrixPieces(shape, starts, tuple(after - before for before, after in pairwise(bounds)))
        offset += math.prod(shape)


def pieces_by_tensor(shapes: Sequence[tuple[int, ...]], ranks: int) -> Iterator[MatrixPieces]:
    """Yield where stage 3 keeps the matrices of a sub-group."""
    offset = 0
    for shape in shapes:
        count = math.prod(shape)
        size = -(-count // ranks)
        lengths = tuple(min(max(count - rank * size, 0), size) for rank in range(ranks))
        yield MatrixPieces(shape, (offset,) * ranks, lengths)
        offset += size


def _verify(shard: Tensor, parameter: nn.Parameter, matrix: MatrixPieces, rank: int) -> None:
    """Check that this rank's piece of the fp32 shard holds the weights of the model."""
    start, length = matrix.starts[rank], matrix.lengths[rank]
    if hasattr(parameter, "ds_tensor"):
        expected = parameter.ds_tensor.detach()[:length]
    else:
        before = sum(matrix.lengths[:rank])
        expected = parameter.detach().flatten()[before : before + length]
    if not torch.equal(shard.detach()[start : start + length].to(expected.dtype), expected):
        raise RuntimeError(f"DeepSpeed laid out a {matrix.shape} matrix in another way over its shards than expected")
