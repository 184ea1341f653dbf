"""Guard a run: each guard watches for one kind of trouble, and warns, sends the run back, or ends it."""

from collections.abc import Mapping
from typing import Any

from plumbline.launcher.runtime.config.guards import GuardsConfig
from plumbline.launcher.runtime.config.plan import RunPlan
from plumbline.launcher.runtime.engine.step_result import StepResult
from plumbline.launcher.runtime.train.guards.guard import Guard
from plumbline.launcher.runtime.train.guards.non_finite import NonFinite
from plumbline.launcher.runtime.train.guards.spike import GradientSpike, LossSpike


class Guards:
    """Ask all guards of a run, in the order in which they look; methods are those of `Guard`.

    Args:
        guards: no two of a kind.
    """

    def __init__(self, *guards: Guard) -> None:
        self._guards = guards

    def after_step(self, step: int, result: StepResult) -> None:
        """Show an update to all."""
        for guard in self._guards:
            guard.after_step(step, result)

    def after_evaluation(self, record: Mapping[str, Any]) -> None:
        """Show an evaluation to all."""
        for guard in self._guards:
            guard.after_evaluation(record)

    @property
    def trusts_weights(self) -> bool:
        """Return whether all trust the weights."""
        return all(guard.trusts_weights for guard in self._guards)

    @property
    def state(self) -> dict[str, Any]:
        """Return name -> what a guard remembers."""
        return {guard.name: guard.state for guard in self._guards}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Let each guard remember what it did; one that is new begins anew."""
        for guard in self._guards:
            guard.restore(state.get(guard.name, {}))


def make_guards(settings: GuardsConfig, plan: RunPlan) -> Guards:
    """Return the guards that a run asks for."""
    quiet_steps = plan.batches.steps_for(plan.schedule.warmup_end)
    guards: list[Guard] = [NonFinite(settings.non_finite, plan.total_steps)]
    if settings.gradient_spike.action != "ignore":
        guards.append(GradientSpike(settings.gradient_spike, quiet_steps))
    if settings.loss_spike.action != "ignore":
        guards.append(LossSpike(settings.loss_spike, quiet_steps))
    return Guards(*guards)
