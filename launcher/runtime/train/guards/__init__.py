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
from plumbline.model.kinds import check_written


class Guards:
    """Call all guards of a run in order; the methods are those of `Guard`.

    Args:
        guards: at most one of each kind.
    """

    def __init__(self, *guards: Guard) -> None:
        self._guards = guards
        for guard in guards:
            check_written(guard, Guard, ("name",))

    def before_step(self, step: int, micro_batches: int) -> None:
        """Tell all guards which step is next."""
        for guard in self._guards:
            guard.before_step(step, micro_batches)

    def before_update(self) -> None:
        """Let all guards check the gradients."""
        for guard in self._guards:
            guard.before_update()

    def after_update(self) -> None:
        """Let all guards check the weights."""
        for guard in self._guards:
            guard.after_update()

    def after_step(self, step: int, result: StepResult) -> None:
        """Show an update to all guards."""
        for guard in self._guards:
            guard.after_step(step, result)

    def found(self, step: int) -> dict[str, Any]:
        """Return what all guards log about an update."""
        return {key: value for guard in self._guards for key, value in guard.found(step).items()}

    def after_evaluation(self, record: Mapping[str, Any]) -> None:
        """Show an evaluation to all guards."""
        for guard in self._guards:
            guard.after_evaluation(record)

    def before_save(self, step: int) -> None:
        """Let all guards check what is about to be saved."""
        for guard in self._guards:
            guard.before_save(step)

    @property
    def trusts_weights(self) -> bool:
        """Return whether all guards trust the weights."""
        return all(guard.trusts_weights for guard in self._guards)

    @property
    def state(self) -> dict[str, Any]:
        """Return name -> state of each guard."""
        return {guard.name: guard.state for guard in self._guards}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of each guard; a guard without one starts fresh.

        Raises:
            DamagedFileError: a checkpoint's state of a guard is not of the right form.
        """
        for guard in self._guards:
            with reading(f"{STATE}: guards.{guard.name}"):
                guard.restore(state.get(guard.name, {}))


def make_guards(settings: GuardsConfig, plan: RunPlan, *others: Guard) -> Guards:
    """Return the guards that a run enables, after `others`, which look into the engine."""
    quiet_steps = plan.batch_plan.steps_for(plan.schedule.warmup_end)
    guards: list[Guard] = [*others, NonFinite(settings.non_finite, plan.total_steps)]
    if settings.gradient_spike.action != "ignore":
        guards.append(GradientSpike(settings.gradient_spike, quiet_steps))
    if settings.loss_spike.action != "ignore":
        guards.append(LossSpike(settings.loss_spike, quiet_steps))
    return Guards(*guards)


def engine_guards(settings: GuardsConfig, engine: Engine) -> list[Guard]:
    """Return the guards that look into the engine: those that compare ranks, and `Transfer`."""
    guards: list[Guard] = []
    if engine.world.size > 1:
        guards.append(Replicas(engine, settings.replica_interval))
    if settings.replay_interval is not None:
        guards.append(Replay(engine, settings.replay_interval))
    return [*guards, Transfer(engine, settings.transfer)]
