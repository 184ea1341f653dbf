"""Run Muon on shards: `torch.optim.Muon` for matrices that an engine has cut into flat pieces over the ranks.

From ZeRO-1 on the optimizer sees flat fp32 shards, each with pieces of some matrices. The momentum is elementwise and
stays sharded. Orthogonalisation needs whole matrices: each has an owner among the ranks that hold a piece of it, which
receives the pieces of the update in bf16 (torch.optim.Muon rounds them to bf16 first anyway) and sends the pieces of
the result back. So every matrix is orthogonalised once, the ranks share the work, and the result is that of
torch.optim.Muon at stage 0. It proceeds in rounds of one matrix per owner, so that a rank holds one whole matrix at a
time.

DeepSpeed 0.19.8 has a Muon of its own. It is not used: in fp32, and at stages 2 and 3, it clips the orthogonalised
update instead of the gradient, and the norm that it reports mixes the two.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, Field
from torch import Tensor, nn

from plumbline.launcher.runtime.optim.kind import Groups, OptimizerKind
from plumbline.launcher.runtime.optim.whole_matrices import MatrixPieces, WholeMatrixOptimizer
from plumbline.launcher.runtime.ranks.world import World


@dataclass(frozen=True)
class ShardedMatrix(MatrixPieces):
    """Add the rank that orthogonalises the matrix."""

    owner: int

    def of(self, rank: int) -> slice:
        """Return where a rank's piece is in its shard."""
        return slice(self.starts[rank], self.starts[rank] + self.lengths[rank])


class ShardedMuon(WholeMatrixOptimizer):
    """Update flat shards by Muon with Nesterov momentum, its update scaled to AdamW's RMS.

    Each group needs lr, weight_decay and momentum.

    Args:
        groups: the hidden matrices, whole.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups)
        self.rank = 0
        self.rounds: dict[Tensor, list[list[ShardedMatrix]]] = {}

    def attach(self, located: Mapping[Tensor, Sequence[MatrixPieces]], world: World) -> None:
        """Set where the matrices are in this rank's shards, and distribute the work over the ranks."""
        self.rank = world.rank
        self.rounds = {shard: in_rounds(assign_owners(pieces), world.size) for shard, pieces in located.items()}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every shard once. Collective."""
        for group in self.param_groups:
            for shard in group["params"]:
                assert shard.grad is not None, "an engine gives every shard its gradient"
                state = self.state[shard]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(shard)
                momentum = state["momentum_buffer"].lerp_(shard.grad, 1 - group["momentum"])
                shard.mul_(1 - group["lr"] * group["weight_decay"])
                for matrices in self.rounds[shard]:
                    mine = [matrix.of(self.rank) for matrix in matrices]
                    updates = [shard.grad[piece].lerp(momentum[piece], group["momentum"]) for piece in mine]
                    for piece, step in zip(mine, orthogonal_steps(updates, matrices, self.rank), strict=True):
                        shard[piece].add_(step, alpha=group["lr"])


def assign_owners(matrices: Iterable[MatrixPieces]) -> list[ShardedMatrix]:
    """Assign each matrix to the least loaded of the ranks that hold a piece of it."""
    load: dict[int, int] = {}
    layout = []
    for matrix in matrices:
        holders = (rank for rank, length in enumerate(matrix.lengths) if length)
        owner = min(holders, key=lambda rank: load.get(rank, 0))
        rows, columns = matrix.shape
        load[owner] = load.get(owner, 0) + rows * columns * min(rows, columns)  # cost of Newton-Schulz
        layout.append(ShardedMatrix(matrix.shape, matrix.starts, matrix.lengths, owner))
    return layout


def in_rounds(layout: Sequence[ShardedMatrix], ranks: int) -> list[list[ShardedMatrix]]:
    """Return the matrices in rounds of at most one per owner, in the order of owners."""
    by_owner = [[matrix for matrix in layout if matrix.owner == rank] for rank in range(ranks)]
    return [[matrix for matrix in column if matrix is not None] for column in zip_longest(*by_owner)]


def orthogonal_steps(updates: Sequence[Tensor], matrices: Sequence[ShardedMatrix], rank: int) -> Sequence[Tensor]:
    """Return this rank's pieces of the orthogonalised updates, in fp32: the change of the weights at lr = 1.

    Collective.

    Args:
        updates: this rank's piece of each matrix's update.
        matrices: one round: at most one per owner, in the order of owners.
        rank: this rank.
    """
    mine = {matrix.owner: matrix.lengths[rank] for matrix in matrices}
    outgoing = [mine.get(owner, 0) for owner in range(len(matrices[0].lengths))]
    owned = next((matrix for matrix in matrices if matrix.owner == rank), None)
    incoming = [0] * len(outgoing) if owned is None else list(owned.lengths)

    whole = _exchange(torch.cat([*updates]).bfloat16(), outgoing, incoming).float()  # in rank order, so row by row
    step = whole if owned is None else orthogonal_step(whole.view(owned.shape)).flatten()
    found: Sequence[Tensor] = _exchange(step, incoming, outgoing).split([matrix.lengths[rank] for matrix in matrices])
    return found


def _exchange(flat: Tensor, outgoing: list[int], incoming: list[int]) -> Tensor:
    """Send `outgoing` elements to each rank and receive `incoming` from each."""
    received = flat.new_empty(sum(incoming))
    dist.all_to_all_single(received, flat, incoming, outgoing)
    return received


def orthogonal_step(update: Tensor) -> Tensor:
    """Return what torch.optim.Muon adds to a matrix for this update at lr = 1, scaled to the RMS of an AdamW step.

    torch has no public function for it. So its Muon, without momentum and decay, updates a matrix of zeros.
    """
    stand_in = nn.Parameter(torch.zeros_like(update))
    stand_in.grad = update
    torch.optim.Muon([stand_in], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn="match_rms_adamw").step()
    return stand_in.detach()


class MuonKeys(BaseModel):
    """Hold the keys of the optimizer section that Muon alone uses."""

    momentum: float | None = Field(default=None, ge=0, lt=1)
    """For `name: muon`: Nesterov momentum. None: 0.95."""


def _make(groups: Groups, sharded: bool) -> torch.optim.Optimizer:
    if sharded:
        return ShardedMuon(groups)
    return torch.optim.Muon(groups, adjust_lr_fn="match_rms_adamw")


def _one_moment_less(shape: tuple[int, ...], _keys: MuonKeys) -> float:
    return -4.0 * math.prod(shape)


MUON = OptimizerKind(
    "muon",
    _make,
    reads=(),
    own_keys={"momentum": 0.95},
    matrix_update="orthogonal",
    zero_stages=(0, 1, 2, 3),  # matrices are assembled from their pieces
    offload_refusal="orthogonalises on the device",
    state_beyond_adamw=_one_moment_less,
)
