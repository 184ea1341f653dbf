"""Guard a run: each guard watches for one kind of trouble, and warns, sends the run back, or ends it."""

from collections.abc import Mapping
from typing import Any

from plumbline.data.damage import reading
from plumbline.launcher.runtime.checkpoint.store import STATE
from plumbline.launcher.runtime.config.guards import GuardsConfig
from plumbline.launcher.runtime.config.plan import RunPlan
from plumbline.launcher.runtime.engine.base import Engine
from plumbline.launcher.runtime.engine.step_result import StepResult
from plumbline.launcher.runtime.train.guards.guard import Guard
from plumbline.launcher.runtime.train.guards.non_finite import NonFinite
from plumbline.launcher.runtime.train.guards.replay import Replay
from plumbline.launcher.runtime.train.guards.replicas import Replicas
from plumbline.launcher.runtime.train.guards.spike import GradientSpike, LossSpike
from plumbline.launcher.runtime.train.guards.transfer import Transfer


class Guards:
    """Ask all guards of a run, in the order in which they look; methods are those of `Guard`.

    Args:
        guards: no two of a kind.
    """

    def __init__(self, *guards: Guard) -> None:
        self._guards = guards

    def before_step(self, step: int, micro_batches: int) -> None:
        """Tell all which step comes."""
        for guard in self._guards:
            guard.before_step(step, micro_batches)

    def before_update(self) -> None:
        """Let all look at the gradients."""
        for guard in self._guards:
            guard.before_update()

    def after_update(self) -> None:
        """Let all look at the weights."""
        for guard in self._guards:
            guard.after_update()

    def after_step(self, step: int, result: StepResult) -> None:
        """Show an update to all."""
        for guard in self._guards:
            guard.after_step(step, result)

    def found(self, step: int) -> dict[str, Any]:
        """Return what all have to log of an update."""
        return {key: value for guard in self._guards for key, value in guard.found(step).items()}

    def after_evaluation(self, record: Mapping[str, Any]) -> None:
        """Show an evaluation to all."""
        for guard in self._guards:
            guard.after_evaluation(record)

    def before_save(self, step: int) -> None:
        """Let all look at what is about to be saved."""
        for guard in self._guards:
            guard.before_save(step)

    @property
    def trusts_weights(self) -> bool:
        """Return whether all trust the weights."""
        return all(guard.trusts_weights for guard in self._guards)

    @property
    def state(self) -> dict[str, Any]:
        """Return name -> what a guard remembers."""
        return {guard.name: guard.state for guard in self._guards}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Let each guard remember what it did; one that is new begins anew.

        Raises:
            DamagedFileError: what a checkpoint says of a guard is not of its kind.
        """
        for guard in self._guards:
            with reading(f"{STATE}: guards.{guard.name}"):
                guard.restore(state.get(guard.name, {}))


def make_guards(settings: GuardsConfig, plan: RunPlan, *others: Guard) -> Guards:
    """Return the guards that a run asks for, with those that look into the engine first."""
    quiet_steps = plan.batch_plan.steps_for(plan.schedule.warmup_end)
    guards: list[Guard] = [*others, NonFinite(settings.non_finite, plan.total_steps)]
    if settings.gradient_spike.action != "ignore":
        guards.append(GradientSpike(settings.gradient_spike, quiet_steps))
    if settings.loss_spike.action != "ignore":
        guards.append(LossSpike(settings.loss_spike, quiet_steps))
    return Guards(*guards)


def engine_guards(settings: GuardsConfig, engine: Engine) -> list[Guard]:
    """Return the guards that look into the engine: those that compare ranks, and that of the table."""
    guards: list[Guard] = []
    if engine.world.size > 1:
        guards.append(Replicas(engine, settings.replica_interval))
    if settings.replay_interval is not None:
        guards.append(Replay(engine, settings.replay_interval))
    return [*guards, Transfer(engine, settings.transfer)]
