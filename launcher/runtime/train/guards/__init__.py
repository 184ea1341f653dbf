"""Guard a run: each guard watches for one kind of trouble, and ends the run or warns."""

from collections.abc import Callable

from plumbline.launcher.runtime.config.plan import RunPlan
from plumbline.launcher.runtime.train.guards.guard import Guard
from plumbline.launcher.runtime.train.guards.non_finite import NonFinite


def make_guards(plan: RunPlan, warn: Callable[[str], None]) -> list[Guard]:
    """Return the guards of a run, in the order in which they look.

    Args:
        plan: what the run will do.
        warn: tells the user something, once for all ranks.
    """
    return [NonFinite(plan.total_steps, warn)]
