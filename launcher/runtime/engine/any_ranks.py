"""Train with the same bits on any number of ranks (run.reproducible: any_ranks).

Floating-point sums depend on the order of their terms, and normally the order of a gradient's terms depends on the
number of ranks. Here gradients are summed over one binary tree of the global batch's micro-batches, which is the same
for any number of ranks (`tree_sum.py`). Random numbers are keyed by the number of the micro-batch too. Each rank
computes the norm, from whole tensors. Updates are elementwise or per matrix, so it does not matter which rank holds
which.

DeepSpeed accumulates and reduces no gradients here: every rank has the whole gradient, writes its part beside the
master weights of its shard and updates them; then DeepSpeed gathers the weights as after any other step.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.profiler import record_function

from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.engine.on_device import not_finite
from plumbline.launcher.runtime.engine.tree_sum import TreeSum, order_of_lanes, sum_over_tree
from plumbline.launcher.runtime.optim.clipping import base_equivalent_norm, clip_factor
from plumbline.launcher.runtime.ranks.world import World
from plumbline.model.objectives.objective import Batch


class AnyRanksEngine(DeepSpeedEngine):
    """Train at ZeRO stage 0, 1 or 2, with the same bits on 1, 2, 4, ... ranks.

    On a CPU each rank computes with one thread, since the number of threads changes the order of sums.

    Args:
        config: the run; `config/rank_counts.py` has checked it against the number of ranks.
        world: this process among all; the process group must be up.
        weights: by name, instead of those that the seed draws.
        restored: all weights will be restored from a checkpoint, and none is drawn.
    """

    def __init__(
        self, config: Config, world: World, weights: Mapping[str, Tensor] | None = None, restored: bool = False
    ) -> None:
        if world.device.type == "cpu":
            torch.set_num_threads(1)
        super().__init__(config, world, weights, restored)
        self._shapes = {name: parameter.shape for name, parameter in self.trained().items()}
        self._gradient: dict[str, Tensor] = {}

    def _make_gradient(self, batches: Sequence[Batch], step: int, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Sum gradient, loss and reports over the tree; only rank 0 returns the total loss and reports."""
        ranks, rank = self.world.size, self.world.rank
        self._gradient = {}  # frees the last step's
        mine = TreeSum()
        for lane in order_of_lanes(len(batches) * ranks, ranks):
            for index in lane:
                self._seed(step, index * ranks + rank)
                with record_function("step: gradient of a micro-batch"):
                    mine.add(self._leaf(batches[index], step, 1 / targets))
            mine.end_lane()
        whole = sum_over_tree(mine.total, self.world)
        sizes = [shape.numel() for shape in self._shapes.values()]
        gradients, total, reports = whole.split([sum(sizes), 1, len(whole) - sum(sizes) - 1])
        parts = zip(self._shapes.items(), gradients.split(sizes), strict=True)
        self._gradient = {name: part.view(shape) for (name, shape), part in parts}
        found = total[0], reports.view(-1, 2)
        if self.world.is_main:
            return found
        return torch.zeros_like(found[0]), torch.zeros_like(found[1])  # because the step sums both over ranks

    def _leaf(self, batch: Batch, step: int, weights: Tensor) -> Tensor:
        """Return gradient, cross-entropy and reports of one micro-batch in one flat tensor, fp32."""
        cross_entropy, reports, gradients = self.local_gradient(batch, step, weights)
        terms = [*gradients, cross_entropy, reports]
        del gradients
        terms.reverse()
        flat = torch.empty(sum(term.numel() for term in terms), device=self.world.device)
        for part in flat.split([term.numel() for term in reversed(terms)]):
            part.copy_(terms.pop().flatten())  # each is freed as soon as it is copied
        return flat

    def _update(self) -> tuple[Tensor, Tensor]:
        """Clip the whole gradient, give each shard its part, and update."""
        norm = self._norm()
        limit = self.config.optimizer.grad_clip
        factor = clip_factor(norm, limit) if limit else torch.ones_like(norm)
        for shard in self.master_weights():
            if shard.grad is None:
                shard.grad = torch.zeros_like(shard)  # also if it is all padding: each rank counts steps
        for piece in self.pieces():
            if piece.trained and piece.length:
                assert piece.shard.grad is not None, "every shard has one"
                part = self._gradient[piece.name].view(-1)[piece.start : piece.start + piece.length]
                torch.mul(part, factor, out=piece.of(piece.shard.grad))
        skipped = not_finite(norm)
        if self._on_device:
            self._optimizer.found_inf = skipped
            self._optimizer.step()
        elif not skipped:
            self._optimizer.step()
        self.refresh_weights()
        return norm, 1 - skipped

    def _norm(self) -> Tensor:
        """Return the norm of the whole gradient that clipping limits, a scalar."""
        if self.config.optimizer.grad_clip_norm == "plain":
            return get_total_norm(list(self._gradient.values()))
        groups = [[self._gradient[name] for name in group["parameters"]] for group in self.settings.values()]
        return base_equivalent_norm([get_total_norm(group) for group in groups], self.groups)

    def gradient(self, name: str) -> Tensor:
        """Return the whole gradient of a tensor, before clipping."""
        return self._gradient[name]
