"""Trace some steps of a run, and show in a table where their time goes: `train.profile`, docs/performance.md."""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.system.log import LOG, TRAINING

PARTS = "step: "
"""Prefix of the names by which the loop and the engines mark the parts of a step."""
OPERATORS = 15  # in the table


class StepProfiler:
    """Trace the steps of `train.profile` on rank 0, unless training starts after the first of them.

    As a context it drops an incomplete trace when training ends.

    Args:
        config: the run.
        world: this process among all.
    """

    def __init__(self, config: Config, world: World) -> None:
        self._settings = config.train.profile if world.is_main else None
        self._folder = config.run.folder / "profile"
        self._activities = [ProfilerActivity.CPU]
        if world.device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profile: profile | None = None

    def __enter__(self) -> "StepProfiler":
        """Return the profiler."""
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        """Stop tracing."""
        if self._profile is not None and self._settings is not None:
            self._profile.stop()
            last = self._settings.start + self._settings.steps - 1
            LOG.warning(f"train.profile: nothing is written: training ended, or went back, before step {last} was made")

    def before_step(self, step: int) -> None:
        """Begin before the first step to trace; `step` steps are done."""
        if self._settings is not None and step + 1 == self._settings.start:
            # Without acc_events it warns that events would be lost
            self._profile = profile(activities=self._activities, acc_events=True)
            self._profile.start()

    def after_step(self, step: int) -> None:
        """Write the trace after the last traced step, before its evaluation; `step` steps are done."""
        settings = self._settings
        if settings is not None and self._profile is not None and step + 1 == settings.start + settings.steps:
            found, self._profile = self._profile, None
            found.stop()
            try:
                self._write(found, settings.steps)
            except OSError as error:  # a missing trace must not end a run
                LOG.warning(f"the steps of train.profile were traced, and not written: {error}")

    def _write(self, found: profile, steps: int) -> None:
        self._folder.mkdir(exist_ok=True)
        found.export_chrome_trace(str(self._folder / "trace.json.gz"))
        lines = list(table(found.key_averages(), found.events() or [], steps))
        (self._folder / "steps.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
        TRAINING.info(f"traced {steps} step(s): {self._folder}/steps.txt; open trace.json.gz in ui.perfetto.dev")


def table(averages: Sequence[Any], events: Sequence[Any], steps: int) -> Iterator[str]:
    """Yield the parts of a step, then the operators with the longest self time, in milliseconds per step.

    Args:
        averages: the profiler's averages by name, over all steps.
        events: the profiler's events.
        steps: number of steps.
    """
    on_gpu = torch.cuda.is_available()
    called = [each for each in averages if each.device_type == DeviceType.CPU]  # a kernel counts for its caller
    parts = [each for each in called if each.key.startswith(PARTS) and each.cpu_time_total]
    others = [each for each in called if not each.key.startswith(PARTS)]
    longest = sorted(others, key=lambda each: -(each.self_device_time_total if on_gpu else each.self_cpu_time_total))
    device = device_times(events)
    yield f"{'part of a step':<48}{'host ms':>10}{'device ms':>11}{'times':>8}"
    for each in parts:
        yield _line(each.key.removeprefix(PARTS), each.cpu_time_total, device[each.key], each.count, steps)
    yield ""
    yield f"{'operator, by itself':<48}{'host ms':>10}{'device ms':>11}{'times':>8}"
    for each in longest[:OPERATORS]:
        yield _line(each.key, each.self_cpu_time_total, each.self_device_time_total, each.count, steps)


def device_times(events: Sequence[Any]) -> dict[str, float]:
    """Return the GPU microseconds of each part of a step, launched during it by any thread.

    The backward pass launches kernels from its own threads, which torch does not count for the part around it.
    """
    spans = [
        (each.name, each.time_range.start, each.time_range.end)
        for each in events
        if each.name.startswith(PARTS) and each.device_type == DeviceType.CPU
    ]
    found = dict.fromkeys((name for name, _, _ in spans), 0.0)
    for event in (event for event in events if event.kernels):
        taken = sum(kernel.duration for kernel in event.kernels)
        for name, start, end in spans:
            if start <= event.time_range.start < end:
                found[name] += taken
    return found


def _line(name: str, host: float, device: float, count: int, steps: int) -> str:
    """Return a row of microseconds over all steps."""
    return f"{name[:47]:<48}{host / steps / 1000:>10.3f}{device / steps / 1000:>11.3f}{count / steps:>8.1f}"
