"""Show the progress of training: a bar on a terminal, a line every few seconds in a log."""

import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from plumbline.launcher.runtime.commands.cli import duration
from plumbline.launcher.runtime.system.log import TRAINING

LOG_SECONDS = 5.0  # between lines, so that a log of a long run stays readable
BAR = "step {n_fmt}/{total_fmt} |{bar:10}| {desc}"


class StepProgress:
    """Show training steps as they are logged."""

    def __init__(self, step: int, total_steps: int, work_before: Callable[[int], int]) -> None:
        """Begin at a step.

        Args:
            step: step from which training (re)starts.
            total_steps: number of steps of the run.
            work_before: returns the work of the first n steps, in any unit, to estimate the time left when steps
                differ in size.
        """
        self._total, self._work_before = total_steps, work_before
        self._bar = tqdm(
            total=total_steps,
            initial=step,
            bar_format=BAR,
            miniters=1,
            dynamic_ncols=True,
            file=sys.stdout,
            disable=None,  # where no terminal shows it
        )
        self._first: tuple[int, float] | None = None
        self._printed = float("-inf")

    def update(self, record: dict[str, Any]) -> None:
        """Show a step: on a terminal at once, in a log at most every few seconds (the first and last always)."""
        step, now = record["step"], time.monotonic()
        eta = f"eta {self._time_left(step, now)}"
        mfu = ""
        if "mfu" in record:
            mfu = "  mfu unknown, peak too low" if record["mfu"] is None else f"  mfu {record['mfu']:.1%}"
        told = (
            f"loss {record['loss']:.4f}  lr {record['lr']:.2e}  grad {record['grad_norm']:.2f}  "
            f"{record['tokens_per_second']:,.0f} tokens/s{mfu}"
        )
        self._bar.set_description_str(f"{eta}  {told}", refresh=False)  # cut off at the end if it is too long
        self._bar.update(step - self._bar.n)
        if now - self._printed < LOG_SECONDS and step != self._total:
            return
        self._printed = now
        line = f"step {step:>{len(str(self._total))}}/{self._total}  {told}  {eta}"
        TRAINING.info(line, extra={"in_bar": not self._bar.disable})

    def _time_left(self, step: int, now: float) -> str:
        """Return the time left, extrapolated from the time since the first step that was shown.

        The time before it is not representative: start-up, compilation, and on a busy machine many times a step's time.
        """
        done, whole = self._work_before(step), self._work_before(self._total)
        if self._first is None:
            self._first = done, now
        first, since = self._first
        if done == whole:
            return duration(0)
        return "-:--" if done == first else duration((now - since) / (done - first) * (whole - done))

    def close(self) -> None:
        """Leave the bar in place, on its own line."""
        self._bar.close()
