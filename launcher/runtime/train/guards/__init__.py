"""Guard a run: each guard watches for one kind of trouble, and ends the run or warns."""

from plumbline.launcher.runtime.config.plan import RunPlan
from plumbline.launcher.runtime.train.guards.guard import Guard
from plumbline.launcher.runtime.train.guards.non_finite import NonFinite


def make_guards(plan: RunPlan) -> list[Guard]:
    """Return the guards of a run, in the order in which they look."""
    return [NonFinite(plan.total_steps)]
