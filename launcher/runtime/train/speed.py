"""Measure tokens per second and model FLOPs utilisation."""

import time
from functools import cache

import torch

from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.system.log import TRAINING
from plumbline.model.flops import training_flops_per_token

# Dense bf16 peak of one GPU in TFLOP/s, from the vendors' data sheets; matched against the device name in this order
PEAK_BF16_TFLOPS = {
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "A100": 312.0,
    "L40S": 362.0,
}


class SpeedMeter:
    """Measure the speed over the steps since the last reading, without evaluations and saves.

    mfu = tokens/s x training FLOPs per token (`model.flops`) / (ranks x peak of one device); None from the first value
    above 1 on, which proves that the peak is too low: measured while the machine was busy, or on slow cores.
    """

    def __init__(self, config: Config, world: World) -> None:
        dtype = torch.bfloat16 if config.deepspeed.precision == "bf16" else torch.float32
        self.peak = peak_flops(world, dtype, config.metrics.peak_tflops) * world.size
        self.tokens_before = config.data.batch_plan.tokens_before
        self.flops_per_token = training_flops_per_token(config.model, config.data.sequence_length, config.objective)
        self._peak_is_wrong = False
        self.step_seconds = 0.0
        """Mean seconds per step in the last reading."""
        self.restart(0)

    def restart(self, step: int) -> None:
        """Start counting now, at `step`."""
        self._time, self._step = time.perf_counter(), step

    def read(self, step: int, done: float | None = None) -> dict[str, float | None]:
        """Return tokens_per_second and mfu since the last restart or reading; warn if the peak turns out to be too low.

        Args:
            step: the step that is read.
            done: when it was done, by `time.perf_counter`; None means now.
        """
        now = time.perf_counter() if done is None else done
        tokens = self.tokens_before(step) - self.tokens_before(self._step)
        seconds = now - self._time
        speed, self.step_seconds = tokens / seconds, seconds / (step - self._step)
        self._time, self._step = now, step
        mfu = speed * self.flops_per_token / self.peak
        if mfu > 1 and not self._peak_is_wrong:
            self._peak_is_wrong = True
            TRAINING.warning(
                f"mfu came out at {mfu:.0%}: the peak of {self.peak / 1e12:.3g} TFLOP/s over all devices is too low, "
                "so earlier values are too high, and later ones are not stated; set metrics.peak_tflops to the peak of "
                "one device"
            )
        return {"tokens_per_second": speed, "mfu": None if self._peak_is_wrong else mfu}


def known_tflops(device_name: str) -> float | None:
    """Return the dense bf16 peak of a GPU in TFLOP/s, by the name that CUDA gives it, or None if it is not known."""
    return next((tflops for known, tflops in PEAK_BF16_TFLOPS.items() if known in device_name), None)


@cache  # a sweep's worker calls this for each cell
def peak_flops(world: World, dtype: torch.dtype, given_tflops: float | None) -> float:
    """Return the peak FLOP/s of one rank's device: given, known by name, or measured (CPUs, other GPUs)."""
    if given_tflops is not None:
        return given_tflops * 1e12
    if world.device.type == "cuda" and dtype == torch.bfloat16:
        known = known_tflops(torch.cuda.get_device_name(world.device))
        if known is not None:
            return known * 1e12
    size = 1024 if world.device.type == "cpu" else 8192
    a = torch.ones(size, size, device=world.device, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        (a @ a)[0, 0].item()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
