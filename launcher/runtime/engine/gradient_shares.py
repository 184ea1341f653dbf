"""Sum gradients at ZeRO stage 1 in bf16 where they lie, and over ranks while the backward pass goes on.

DeepSpeed's BF16_Optimizer copies each gradient to fp32 before adding it, in functions that take the host longer than
small tensors take a GPU. It zeroes all sums twice after each step, to which the first micro-batch adds. After the last
backward pass it copies all sums into messages of whole buffers, has every rank receive all of them, and copies them
back, although a rank updates only a share of the weights (docs/performance.md).

Here gradients are added without a copy, the first one of a step overwrites the sum, each rank receives only its share,
and a group of tensors is sent as soon as the last micro-batch has given all of its gradients.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plumbline.launcher.runtime.ranks.collectives import sum_over_ranks


class GradientShares:
    """Take the place of the functions of a BF16_Optimizer that add up gradients and sum them over ranks.

    All ranks send the groups in one order, whichever of them are complete first: the group whose first tensor comes
    last in the model begins, since the backward pass goes from the model's end to its start. What is not complete after
    the last backward pass, because a tensor got no gradient, is sent then.

    Args:
        engine: the DeepSpeed engine.
        ranks: number of ranks.
    """

    def __init__(self, engine: Any, ranks: int) -> None:
        self._engine, self._zero, self._ranks = engine, engine.optimizer, ranks
        place = {id(parameter): number for number, parameter in enumerate(engine.module.parameters())}
        first = [min(place[id(parameter)] for parameter in group) for group in self._zero.bf16_groups]
        self._order = sorted(range(len(first)), key=first.__getitem__, reverse=True)
        self._begin()
        self._zero.accumulate_hp_grads_and_remove_lp = self._add
        self._zero.clear_hp_grads = self._forget
        engine.buffered_allreduce_fallback = self._finish
        if ranks > 1:
            self._zero.get_grads_for_norm = self._shares_for_norm  # so the norm is that of the whole gradient

    def _begin(self) -> None:
        """Expect a gradient of every tensor from the last micro-batch of the next step."""
        self._awaited = [len(group) for group in self._zero.fp32_groups_gradients]
        self._unsent = list(self._order)
        self._sent: list[tuple[Tensor, Tensor, dist.Work]] = []

    def _add(self, parameter: nn.Parameter, group: int, index: int) -> None:
        """Add the gradient that the backward pass has just completed for a tensor, and send what is complete."""
        if parameter.grad is None:  # as in DeepSpeed
            return
        total = self._zero.fp32_groups_gradients[group][index]
        gradient = parameter.grad.view(total.shape)
        if self._zero.fp32_groups_has_gradients[group][index]:
            total.add_(gradient)
        else:
            total.copy_(gradient)
            self._zero.fp32_groups_has_gradients[group][index] = True
        parameter._hp_grad = total  # type: ignore[attr-defined]  # where DeepSpeed's functions look for it
        parameter.grad = None
        if self._ranks > 1 and self._engine.is_gradient_accumulation_boundary():
            self._awaited[group] -= 1
            while self._unsent and self._awaited[self._unsent[0]] == 0:
                self._send(self._unsent.pop(0))

    def _send(self, group: int) -> None:
        """Have this rank receive its share of a group's sum over ranks, in the dtype of messages. Collective."""
        zero = self._zero
        whole, share = zero.fp32_groups_gradients_flat[group], zero.fp32_groups_gradient_flat_partition[group]
        message = whole.to(self._engine.communication_data_type)  # itself, unless it is rounded
        part = message.narrow(0, share.storage_offset() - whole.storage_offset(), share.numel())
        work = dist.reduce_scatter_tensor(part, message, group=zero.real_dp_process_group[group], async_op=True)
        self._sent.append((share, part, work))

    def _finish(self, **_unused: Any) -> None:
        """Replace each share by the mean over ranks, once all backward passes of a step are done. Collective."""
        zero = self._zero
        for totals, has_gradient in zip(zero.fp32_groups_gradients, zero.fp32_groups_has_gradients, strict=True):
            for total, has in zip(totals, has_gradient, strict=True):
                if not has:
                    total.zero_()  # what an earlier step has left there
        if self._ranks > 1:
            for group in self._unsent:
                self._send(group)
            for share, part, work in self._sent:
                work.wait()
                share.copy_(part).div_(self._ranks)
        self._begin()

    def _forget(self) -> None:
        """Have the next step overwrite the sums."""
        zero = self._zero
        zero.fp32_groups_has_gradients = [[False] * len(group) for group in zero.fp32_groups_gradients]

    def _shares_for_norm(self, for_clipping: bool = False) -> Any:
        """Return what DeepSpeed clips: this rank's shares; or what it takes the norm of: the norm of all ranks'."""
        shares = self._zero.fp32_groups_gradient_flat_partition
        return shares if for_clipping else ([_norm_of_all(shares)], {})


def _norm_of_all(shares: list[Tensor]) -> Tensor:
    """Return the norm of a gradient from each rank's shares; squares are summed in fp64. Collective."""
    squares = torch.stack(torch._foreach_norm(shares, 2, torch.float64)).square().sum()
    return sum_over_ranks(squares).sqrt().float()
