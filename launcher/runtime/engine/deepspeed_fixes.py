"""Replace functions of DeepSpeed 0.19.8, and add what it leaves out: some lose gradients, some only take longer.

Each says what DeepSpeed does by itself. `tests/benchmarks/engine_certificate.py` shows whether another version needs
the same. deepspeed is imported inside functions, because importing it chooses the accelerator, which `process_group`
prepares.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def restore_linear() -> None:
    """Restore torch's linear function, which DeepSpeed replaces for the whole process at stage 3.

    DeepSpeed's function saves no gathered weight for the backward pass. Compiled blocks save none anyway, and the
    compiler of torch 2.11 makes all gradients of a block zero if it calls DeepSpeed's function with a bias.
    """
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses

    torchs_own = getattr(InsertPostInitMethodToModuleSubClasses, "linear_bk", nn.functional.linear)
    nn.functional.linear = torchs_own


@contextmanager
def no_memory_reports() -> Iterator[None]:
    """Keep BF16_Optimizer from reporting memory while it is made.

    For each report rank 0 collects Python's garbage, which takes 0.15 seconds, twice for each group; and the standard
    output that it goes to is hidden.
    """
    from deepspeed.runtime import bf16_optimizer

    report = bf16_optimizer.see_memory_usage
    bf16_optimizer.see_memory_usage = lambda *_, **__: None
    try:
        yield
    finally:
        bf16_optimizer.see_memory_usage = report


def forget_modules(model: nn.Module) -> None:
    """Take a model out of what stage 3 keeps of all modules for as long as the process lives.

    That is a list of those in the middle of their forward pass, which begins with the model, and a cache of which
    parameters to release after each (0.19.8), from which other engines lose nothing that they cannot compute.
    """
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    gone = set(model.modules())
    FWD_MODULE_STACK[:] = [module for module in FWD_MODULE_STACK if module not in gone]
    for method in vars(PartitionedParameterCoordinator).values():
        for cell in getattr(method, "__closure__", None) or ():  # the cache lies within a decorator
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()


def average_in_fp32(zero: Any, ranks: int) -> None:
    """Make stage 2 divide gradients by the number of ranks after they are summed in fp32.

    DeepSpeed divides the gradients of the backward pass before the sum: in bf16 and with three ranks that rounds once
    more, unlike every other stage. All its sums go through one function (0.19.8), which does not divide.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
        ranks: number of ranks.
    """
    sum_up = zero.allreduce_bucket

    def average(*arguments: Any, **named: Any) -> Tensor:
        summed: Tensor = sum_up(*arguments, **named)
        return summed.div_(ranks)

    zero.gradient_average = False
    zero.allreduce_bucket = average


def forget_gradients(zero: Any) -> None:
    """Zero the gradients at the start of a step at stage 3, as every other stage does.

    DeepSpeed 0.19.8 overwrites the last step's gradient of a tensor only when the first micro-batch yields a new one: a
    tensor that it does not use would be updated by its old gradient again.
    """
    zero.grad_partitions_flat_buffer.zero_()


def forget_offloaded_gradients(zero: Any, masters: Iterable[Tensor]) -> None:
    """Zero the gradients at the start of a step if optimizer states are offloaded.

    DeepSpeed 0.19.8 keeps the gradients in host memory and overwrites only those of tensors that get a new one: the old
    gradients of other tensors would be applied again, or added to. In bf16 at stages 1 and 2 it adds gradients up on
    the device, and keeps that sum when it skips an update: it would then be infinite, and skip every later update.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
        masters: the master weights of this rank.
    """
    for master in masters:
        if master.grad is not None:
            master.grad.zero_()
    if hasattr(zero, "accumulated_grads_in_cpu"):  # at stages 1 and 2: the sums of bf16, and those of fp32
        zero.averaged_gradients.update(dict.fromkeys(zero.averaged_gradients))  # None, as after an update
        for accumulated in zero.accumulated_grads_in_cpu.values():
            accumulated.zero_()


def finish_offloaded_gradients(zero: Any) -> None:
    """Pass the optimizer the offloaded gradients of tensors that got none in the last micro-batch of a step.

    DeepSpeed 0.19.8 passes on only tensors of the last micro-batch, so those of earlier ones would be lost.
    """
    zero.finalize_gradient_accumulation_boundary()
