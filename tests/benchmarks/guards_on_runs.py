"""Show the steps of runs to the guards that look at loss and gradient norm: what they would warn of, and their cost.

    python tests/benchmarks/guards_on_runs.py runs/A runs/B ... [guards.gradient_spike.factor=4 ...]

Steps are those that metrics.jsonl has; each run is looked at by its own configuration, with the overrides, and spikes
are warnings. `watched` counts steps behind a full window and the warm-up, `furthest` is the most robust standard
deviations that a watched step was above its median. It prints one JSON object. Costs are this process's processor time.
"""

import argparse
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.run_files import METRICS
from plumbline.launcher.runtime.engine.step_result import StepResult
from plumbline.launcher.runtime.run.metrics import REPORTED
from plumbline.launcher.runtime.run.outliers import usual_range
from plumbline.launcher.runtime.system.files import read_json_lines
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.train.guards import make_guards
from plumbline.launcher.runtime.train.guards.spike import GradientSpike, LossSpike, Spike


def steps_of(folder: Path) -> dict[int, StepResult]:
    """Return what each step of a run reported, as a guard sees it."""
    return {
        line["step"]: StepResult(
            torch.tensor(line["loss"]), line["grad_norm"], True, torch.zeros(0, 2), flagged=False, done=0.0
        )
        for _, line in read_json_lines(folder / METRICS)
        if line.keys() >= {*REPORTED}
    }


def watch(guard: Spike, steps: dict[int, StepResult]) -> dict[str, Any]:
    """Show all steps to one guard, and return what it saw."""
    watched, furthest, alarms = 0, (0.0, 0), []
    for step, result in steps.items():
        if len(guard.window) == guard.settings.window and step > guard.quiet_steps:
            usual, one_deviation = usual_range(guard.window, 1.0, 0.0)
            watched += 1
            furthest = max(furthest, ((guard.value(result) - usual) / (one_deviation - usual), step))
        before = guard.inside
        guard.after_step(step, result)
        if guard.inside and not before:
            alarms.append(step)
    return {"watched": watched, "alarms": alarms, "furthest": furthest[0], "at_step": furthest[1]}


def look(folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return what the guards see in a run, and the seconds that all of them take for a step."""
    config = load_config(folder / "config.yaml", ["guards.loss_spike.action=warn", "guards.gradient_spike.action=warn",
                                                  *overrides])  # fmt: skip
    plan, steps = plan_run(config), steps_of(folder)
    quiet = plan.batch_plan.steps_for(plan.schedule.warmup_end)
    guards = make_guards(config.guards, plan)
    begun = time.process_time()
    for step, result in steps.items():
        guards.after_step(step, result)
    return {
        "run": folder.name,
        "steps": len(steps),
        "microseconds_a_step": 1e6 * (time.process_time() - begun) / len(steps),
        "state_bytes": len(json.dumps(guards.state)),
        "loss_spike": watch(LossSpike(config.guards.loss_spike, quiet), steps),
        "gradient_spike": watch(GradientSpike(config.guards.gradient_spike, quiet), steps),
    }


def main() -> None:
    """Look at all runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, then section.key=value")
    given = parser.parse_args().runs
    LOG.setLevel(logging.ERROR)  # alarms are counted
    overrides = [word for word in given if "=" in word]
    found = [look(Path(word), overrides) for word in given if "=" not in word]
    alarms = {name: sum(len(each[name]["alarms"]) for each in found) for name in ("loss_spike", "gradient_spike")}
    print(json.dumps({"runs": found, "steps": sum(each["steps"] for each in found), "alarms": alarms}, indent=2))


if __name__ == "__main__":
    main()
