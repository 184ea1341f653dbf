"""Store weights and optimizer states by name and range, so that any number of ranks at any ZeRO stage can resume.

Every rank writes one safetensors file with its part of every tensor, in fp32:

    state/rank_00003.safetensors
        weight/NAME        its range of the flattened master weight
        exp_avg/NAME, ...  the same range of the optimizer's elementwise states
        ema/NAME           the same range of the moving average
        step/NAME, ...     the optimizer's other states of the tensor; on one rank
        __metadata__       index: for each NAME its shape, start of the range, states kept whole, and plain numbers

A reader takes the ranges that it needs from the files that hold them. Nothing is pickled, and DeepSpeed is not needed
to read a checkpoint.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plumbline.launcher.runtime.checkpoint.saved_tensors import FOLDER, SavedTensors, read_headers_together
from plumbline.launcher.runtime.checkpoint.store import CheckpointError, Heartbeat
from plumbline.launcher.runtime.checkpoint.weights import TensorFile
from plumbline.launcher.runtime.engine.base import Engine
from plumbline.launcher.runtime.engine.pieces import Piece
from plumbline.launcher.runtime.optim.optimizer import verify_settings
from plumbline.launcher.runtime.ranks.collectives import on_every_rank

WEIGHT, AVERAGE = "weight", "ema"


def shard_name(rank: int) -> str:
    """Return the name of a rank's file within a checkpoint."""
    return f"{FOLDER}/rank_{rank:05d}.safetensors"


# -- writing -----------------------------------------------------------------------------------------------------------


def collect(engine: Engine, locally: bool = False) -> tuple[TensorFile, list[str]]:
    """Return this rank's file, copied to host memory, and the tensors whose weights or averages in it are not finite.

    Args:
        engine: the engine to save.
        locally: hold all that this rank keeps, so that it can be restored without the files of others; else the ranks
            divide what several of them keep.
    """
    tensors: dict[str, Tensor] = {}
    finite: dict[str, Tensor] = {}
    index: dict[str, Any] = {}
    for number, piece in enumerate(engine.pieces()):
        mine = piece if locally else piece.share(engine.world)
        # Ranks divide the states that all keep whole, such as SOAP's bases; others are written with the first element
        writes_whole = number % engine.world.size == engine.world.rank if piece.is_replicated else mine.start == 0
        whole: list[str] = []
        numbers: dict[str, float] = {}
        for kind, value in _values(engine, piece):
            if isinstance(value, Tensor) and value.shape == piece.shard.shape:
                if mine.length:
                    tensors[f"{kind}/{piece.name}"] = _to_host(mine.of(value))
                    if kind in (WEIGHT, AVERAGE):
                        finite[f"{kind}/{piece.name}"] = _is_finite(mine.of(value)).to(engine.world.device)
            elif not (locally or writes_whole) or not piece.length:
                continue
            elif isinstance(value, Tensor):
                tensors[f"{kind}/{piece.name}"] = _to_host(value)
                whole.append(kind)
            else:
                numbers[kind] = value
        index[piece.name] = {"shape": piece.shape, "start": mine.start, "whole": whole, "numbers": numbers}
    metadata = {"format": "pt", "index": json.dumps(index)}
    if engine.ema is not None:
        metadata["average"] = json.dumps({"half_life": engine.ema.half_life, "tokens": engine.ema.tokens})
    if engine.world.device.type == "cuda":
        torch.cuda.synchronize()  # wait for the copies
    flags = torch.stack(list(finite.values())).tolist() if finite else []
    broken = [key.partition("/")[2] for key, flag in zip(finite, flags, strict=True) if not flag]
    return TensorFile(tensors, metadata), broken


def _values(engine: Engine, piece: Piece) -> Iterator[tuple[str, Any]]:
    """Yield what is saved of a tensor: its weight, its average, and the optimizer's state of its shard."""
    yield WEIGHT, piece.shard
    if not piece.trained or not piece.length:
        return
    if engine.ema is not None:
        yield AVERAGE, engine.ema.of(piece.shard)
    yield from engine.optimizer_state.get(piece.shard, {}).items()


def _is_finite(values: Tensor) -> Tensor:
    """Return whether all values are finite, as a flag on their device, since checking the copy on the host is slow."""
    return torch.stack(values.detach().aminmax()).isfinite().all()


def _to_host(tensor: Tensor) -> Tensor:
    """Start copying a tensor to host memory, which is pinned for a GPU, and which torch reuses for the next save."""
    return host_memory(tensor.shape, tensor.is_cuda).copy_(tensor.detach(), non_blocking=True)


def host_memory(shape: Sequence[int], pinned: bool) -> Tensor:
    """Return fp32 host memory of this shape: pinned if asked for, unless the machine pins no more (`ulimit -l`)."""
    if pinned:
        with suppress(RuntimeError):  # copies to other memory take longer; a broken device refuses them as well
            return torch.empty(shape, dtype=torch.float32, pin_memory=True)
    return torch.empty(shape, dtype=torch.float32)


# -- resuming ----------------------------------------------------------------------------------------------------------


def restore(engine: Engine, folder: Path, heartbeat: Heartbeat) -> None:
    """Load weights, optimizer state and moving average from a checkpoint, whichever ranks wrote it. Collective.

    Each rank reads its own ranges. The hyperparameters are those of the configuration.

    Args:
        engine: the engine to load into.
        folder: the checkpoint.
        heartbeat: called for each tensor that was read.

    Raises:
        CheckpointError: on all ranks, if the tensors are not those of the model, or not all of them were updated
            equally often.
        OSError: on all ranks, if a file could not be read.
    """

    def read() -> None:
        _check_shapes(engine.pieces(), saved, folder)
        state: dict[Tensor, dict[str, Any]] = {}
        for piece in engine.pieces():
            if piece.length:
                piece.of(piece.shard).copy_(saved.read(WEIGHT, piece.name, piece.start, piece.length))
                if piece.trained:
                    there = engine.optimizer_state.get(piece.shard, {})
                    _read_state(piece, saved, state.setdefault(piece.shard, {}), there, folder)
                heartbeat()
        engine.optimizer_state.clear()
        engine.optimizer_state.update(state)
        _restore_average(engine, saved)

    with SavedTensors(folder, read_headers_together(folder, engine.world)) as saved, torch.no_grad():
        on_every_rank(read, engine.world)
        engine.refresh_weights()
    verify_settings(engine.groups, engine.settings)


def _check_shapes(pieces: Sequence[Piece], saved: SavedTensors, folder: Path) -> None:
    asked = {piece.name: piece.shape for piece in pieces}
    if asked != saved.shapes:
        different = sorted(set(asked.items()) ^ set(saved.shapes.items()))
        raise CheckpointError(f"{folder}: holds other tensors than this model has: {different[:3]}")


def _read_state(
    piece: Piece, saved: SavedTensors, state: dict[str, Any], there: Mapping[str, Any], folder: Path
) -> None:
    """Copy this rank's part of a tensor's optimizer state into the new state of its shard.

    If training goes back, the tensors that are `there` are written again: DeepSpeed keeps views of them.
    """
    for kind in sorted(saved.kinds[piece.name] - {WEIGHT, AVERAGE}):
        if kind not in state:  # by the first tensor of a shard for all
            fits = isinstance(there.get(kind), Tensor) and there[kind].shape == piece.shard.shape
            state[kind] = there[kind].zero_() if fits else torch.zeros_like(piece.shard, requires_grad=False)
        piece.of(state[kind]).copy_(saved.read(kind, piece.name, piece.start, piece.length))
    for kind, value in saved.whole(piece.name).items():
        value = value.to(piece.shard.device) if isinstance(value, Tensor) else value
        known = state.setdefault(kind, value)
        if not torch.equal(torch.as_tensor(known), torch.as_tensor(value)):
            raise CheckpointError(f"{folder}: {kind} of {piece.name} is not that of tensors in its group")


def _restore_average(engine: Engine, saved: SavedTensors) -> None:
    """Restore the saved average; without one of this half-life, restart it from the weights."""
    average = engine.ema
    if average is None:
        return
    average.begin_anew()
    if saved.average is None or saved.average["half_life"] != average.half_life:
        return
    average.tokens = saved.average["tokens"]
    for piece in engine.pieces():
        if piece.trained and piece.length:
            values = saved.read(AVERAGE, piece.name, piece.start, piece.length)
            piece.of(average.of(piece.shard)).copy_(values)


# -- reading weights alone ---------------------------------------------------------------------------------------------


def read_model(folder: Path, kind: str = WEIGHT) -> dict[str, Tensor]:
    """Return the fp32 weights of a checkpoint by name, or with `kind` AVERAGE their moving average.

    Raises:
        CheckpointError: the files do not hold all of them.
    """
    return mean_model([folder], kind)


def mean_model(folders: Sequence[Path], kind: str = WEIGHT) -> dict[str, Tensor]:
    """Return the uniform mean of the weights of several checkpoints with the same tensors.

    They are summed in fp64, divided, and rounded once to fp32. Beside the result, one tensor at a time is in memory.

    Raises:
        CheckpointError: the files of a checkpoint do not hold all of its weights.
    """
    with ExitStack() as stack:
        models = [stack.enter_context(SavedTensors(folder)) for folder in folders]
        mean = {}
        for name in models[0].shapes:
            total = _of_model(models[0], kind, name).double()
            for saved in models[1:]:
                total += _of_model(saved, kind, name)
            mean[name] = (total / len(models)).float()
    return mean


def _of_model(saved: SavedTensors, kind: str, name: str) -> Tensor:
    """Return a weight or its average; the average of an untrained tensor is the weight itself."""
    return saved.tensor(kind if kind in saved.kinds[name] else WEIGHT, name)
