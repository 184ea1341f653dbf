"""Muon under ZeRO: `torch.optim.Muon` for matrices that DeepSpeed has cut into flat pieces over the ranks.

From stage 1 on the optimizer sees one flat fp32 shard for each group: a piece of some matrices, no matrix whole. The
momentum is elementwise and stays in pieces, as large as the shard. Orthogonalisation needs whole matrices: each has an
owner among the ranks that hold a piece of it, the pieces of the update travel there in bf16 (the first thing that
torch.optim.Muon does to them is to round them so), and the owner sends the pieces of the result back. So every matrix
is orthogonalised once, the ranks share the work, and the result is that of torch.optim.Muon at stage 0. It goes in
rounds, one matrix for each owner, so that a rank holds one whole matrix at a time.

DeepSpeed 0.19.8 has a Muon of its own. It is not used: in fp32, and at stages 2 and 3, it clips the orthogonalised
update instead of the gradient, and the norm that it reports mixes the two.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plumbline.launcher.runtime.system.world import World


@dataclass(frozen=True)
class ShardedMatrix:
    """Where the ranks hold one matrix: rank after rank a piece of its elements, in the order of its rows."""

    shape: tuple[int, int]
    starts: tuple[int, ...]
    """Of each rank's piece, in that rank's flat shard."""
    lengths: tuple[int, ...]
    """Of each rank's piece, in elements; 0 where a rank holds none."""
    owner: int
    """The rank that orthogonalises it."""


class ShardedMuon(torch.optim.Optimizer):
    """Muon with Nesterov momentum, its update scaled to AdamW's RMS, over the flat shards of ZeRO-1, 2 and 3.

    Each group needs lr, weight_decay and momentum. `attach` must come between DeepSpeed and the first step.

    Args:
        groups: the hidden matrices, as DeepSpeed has not touched them yet.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        self.rank = 0
        self.rounds: dict[Tensor, list[list[ShardedMatrix]]] = {}
        self._parameters: list[list[nn.Parameter]] = [list(group["params"]) for group in self.param_groups]

    def attach(self, zero: Any, stage: int, world: World) -> None:
        """Find the matrices in the shards that DeepSpeed made.

        Args:
            zero: DeepSpeed's ZeRO optimizer, which has been given this one's groups.
            stage: its stage: 1 and 2 cut a group into equal parts, 3 cuts each tensor.
            world: this process among all.

        Raises:
            RuntimeError: a shard does not hold what it should.
        """
        self.rank = world.rank
        shards: list[tuple[Tensor, list[nn.Parameter]]] = []
        if stage == 3:
            ours = {id(parameter) for parameters in self._parameters for parameter in parameters}
            sub_groups = zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)
            shards = [(shard, parameters) for shard, parameters in sub_groups if id(parameters[0]) in ours]
        else:
            shards = [
                (group["params"][0], parameters)
                for group, parameters in zip(self.param_groups, self._parameters, strict=True)
            ]
        for shard, parameters in shards:
            shapes = [tuple(getattr(parameter, "ds_shape", parameter.shape)) for parameter in parameters]
            pieces = pieces_by_tensor(shapes, world.size) if stage == 3 else pieces_by_group(shapes, shard, world.size)
            layout = assign_owners(shapes, pieces)
            for parameter, matrix in zip(parameters, layout, strict=True):
                _verify(shard, parameter, matrix, self.rank)
            self.rounds[shard] = in_rounds(layout, world.size)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update of every shard; all ranks must call together."""
        for group in self.param_groups:
            for shard in group["params"]:
                assert shard.grad is not None, "DeepSpeed gives every shard its gradient"
                state = self.state[shard]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(shard)
                momentum = state["momentum_buffer"].lerp_(shard.grad, 1 - group["momentum"])
                update = shard.grad.lerp(momentum, group["momentum"])
                shard.mul_(1 - group["lr"] * group["weight_decay"])
                for matrices in self.rounds[shard]:
                    for matrix, step in zip(matrices, orthogonal_steps(update, matrices, self.rank), strict=True):
                        start, length = matrix.starts[self.rank], matrix.lengths[self.rank]
                        shard[start : start + length].add_(step, alpha=group["lr"])


Pieces = tuple[tuple[int, ...], tuple[int, ...]]  # starts and lengths, rank by rank


def pieces_by_group(shapes: Sequence[tuple[int, ...]], shard: Tensor, ranks: int) -> Iterator[Pieces]:
    """ZeRO-1 and 2: the tensors one behind the other, cut into one shard of equal length for each rank."""
    offset, size = 0, shard.numel()
    for shape in shapes:
        bounds = [min(max(edge * size, offset), offset + math.prod(shape)) for edge in range(ranks + 1)]
        lengths = tuple(after - before for before, after in pairwise(bounds))
        yield tuple(before - rank * size for rank, before in enumerate(bounds[:-1])), lengths
        offset += math.prod(shape)


def pieces_by_tensor(shapes: Sequence[tuple[int, ...]], ranks: int) -> Iterator[Pieces]:
    """ZeRO-3: each tensor cut into equal parts, the last ones padded; a rank's parts one behind the other."""
    offset = 0
    for shape in shapes:
        count = math.prod(shape)
        size = -(-count // ranks)
        yield (offset,) * ranks, tuple(min(max(count - rank * size, 0), size) for rank in range(ranks))
        offset += size


def assign_owners(shapes: Sequence[tuple[int, ...]], pieces: Iterator[Pieces]) -> list[ShardedMatrix]:
    """Give each matrix to the least busy of the ranks that hold a piece of it."""
    load: dict[int, int] = {}
    layout = []
    for (rows, columns), (starts, lengths) in zip(shapes, pieces, strict=True):
        owner = min((rank for rank, length in enumerate(lengths) if length), key=lambda rank: load.get(rank, 0))
        load[owner] = load.get(owner, 0) + rows * columns * min(rows, columns)  # as Newton-Schulz costs
        layout.append(ShardedMatrix((rows, columns), starts, lengths, owner))
    return layout


def in_rounds(layout: Sequence[ShardedMatrix], ranks: int) -> list[list[ShardedMatrix]]:
    """The matrices in rounds of at most one for each owner, in the order of owners."""
    by_owner = [[matrix for matrix in layout if matrix.owner == rank] for rank in range(ranks)]
    return [[matrix for matrix in column if matrix is not None] for column in zip_longest(*by_owner)]


def _verify(shard: Tensor, parameter: nn.Parameter, matrix: ShardedMatrix, rank: int) -> None:
    """Compare this rank's piece of the fp32 shard with the weights of the model."""
    start, length = matrix.starts[rank], matrix.lengths[rank]
    if hasattr(parameter, "ds_tensor"):
        expected = parameter.ds_tensor.detach()[:length]
    else:
        before = sum(matrix.lengths[:rank])
        expected = parameter.detach().flatten()[before : before + length]
    if not torch.equal(shard.detach()[start : start + length].to(expected.dtype), expected):
        raise RuntimeError(f"DeepSpeed laid out a {matrix.shape} matrix in another way over its shards than expected")


def orthogonal_steps(update: Tensor, matrices: Sequence[ShardedMatrix], rank: int) -> Sequence[Tensor]:
    """This rank's pieces of the orthogonalised updates, as what is to be added at lr = 1; fp32.

    Args:
        update: this rank's pieces of all updates, laid out as its shard.
        matrices: one round: at most one for each owner, in the order of owners.
        rank: this rank.
    """
    mine = {matrix.owner: matrix.lengths[rank] for matrix in matrices}
    outgoing = [mine.get(owner, 0) for owner in range(len(matrices[0].lengths))]
    owned = next((matrix for matrix in matrices if matrix.owner == rank), None)
    incoming = [0] * len(outgoing) if owned is None else list(owned.lengths)

    pieces = [update[matrix.starts[rank] :][: matrix.lengths[rank]] for matrix in matrices]
    whole = _exchange(torch.cat(pieces).bfloat16(), outgoing, incoming).float()  # rank after rank: row after row
    step = whole if owned is None else orthogonal_step(whole.view(owned.shape)).flatten()
    found: Sequence[Tensor] = _exchange(step, incoming, outgoing).split([matrix.lengths[rank] for matrix in matrices])
    return found


def _exchange(flat: Tensor, outgoing: list[int], incoming: list[int]) -> Tensor:
    """Send so many elements to each rank and receive so many from each."""
    received = flat.new_empty(sum(incoming))
    dist.all_to_all_single(received, flat, incoming, outgoing)
    return received


def orthogonal_step(update: Tensor) -> Tensor:
    """What torch.optim.Muon adds to a matrix for this update at lr = 1, scaled to the RMS of an AdamW step.

    torch has no public function for it. So its Muon steps, without momentum and decay, on a stand-in that is 0.
    """
    stand_in = nn.Parameter(torch.zeros_like(update))
    stand_in.grad = update
    torch.optim.Muon([stand_in], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn="match_rms_adamw").step()
    return stand_in.detach()
