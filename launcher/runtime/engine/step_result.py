"""Hold what an optimizer step reports: first in progress on the device, later as numbers on the host.

Reading a number from a device waits until all its queued work is done, and then the device waits for the host. So the
loop launches the next step before it reads the numbers of this one.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from plumbline.launcher.runtime.ranks.collectives import LateSum
from plumbline.launcher.runtime.ranks.device_clock import DeviceClock

_CLOCK = DeviceClock()


@dataclass(frozen=True)
class StepResult:
    """Hold what one optimizer step reports, on the host; the same on every rank but for `done`."""

    loss: Tensor
    """Mean cross-entropy over the valid tokens of the global batch, 0 if it has none: a scalar, nats."""
    grad_norm: float
    """Global gradient norm before clipping."""
    applied: bool
    """False when the update was skipped because of a non-finite gradient."""
    reports: Tensor
    """[reports, 2]: sums and counts of what the objective reports in addition to the loss."""
    flagged: bool
    """Whether any rank's flag was true after it launched the step."""
    done: float
    """When this rank's device finished the step, by `time.perf_counter`."""


class StepUnderWay:
    """Hold one optimizer step until its result is read. All ranks create it together, with one all-reduce.

    Args:
        cross_entropy: this rank's summed cross-entropy, a scalar.
        reports: this rank's sums and counts, [reports, 2].
        flag: this rank's flag.
        targets: valid tokens of the global batch, a scalar.
        grad_norm: of the whole gradient, a scalar.
        applied: 1 if the update was applied, a scalar.
    """

    def __init__(
        self, cross_entropy: Tensor, reports: Tensor, flag: bool, targets: Tensor, grad_norm: Tensor, applied: Tensor
    ) -> None:
        flags = torch.full((1,), float(flag), device=cross_entropy.device)
        # In fp64, in which some stages compute the norm
        shared = torch.stack([each.double() for each in (targets, grad_norm, applied)])
        self._values = LateSum(torch.cat((cross_entropy[None], flags, reports.flatten())), shared, _CLOCK)
        self._made = time.perf_counter()  # when it was done, without an asynchronous device
        self._result: StepResult | None = None

    @property
    def result(self) -> StepResult:
        """Return what the step reports; wait until all ranks have taken it."""
        if self._result is None:
            cross_entropy, flags, *reports, targets, grad_norm, applied = self._values.read()
            self._result = StepResult(
                loss=torch.tensor(cross_entropy) / torch.tensor(max(targets, 1.0)),
                grad_norm=grad_norm,
                applied=bool(applied),
                reports=torch.tensor(reports).view(-1, 2),
                flagged=bool(flags),
                done=self._made if self._values.done is None else self._values.done,
            )
        return self._result
