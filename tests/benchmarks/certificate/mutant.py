"""Define what a mutant of the engine is, and how one is made.

A mutant either asks DeepSpeed for something else than the engine would, whose own check is then switched off, or
changes code of the engine, of its optimizer or of DeepSpeed once the engine is made. All ranks do the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from plumbline.launcher.runtime.engine import base
from plumbline.launcher.runtime.optim.optimizer import set_learning_rates
from tests.benchmarks.certificate.models import Case

Swap = Callable[[Any, str, Any], object]
Fits = Callable[[Case], bool]


@dataclass(frozen=True)
class Mutant:
    """Hold one way to be wrong."""

    change: str
    fits: Fits
    """Says whether the change has an effect on a case."""
    alter: Callable[[Any, Swap], object] = lambda _engine, _swap: None
    """Changes an engine that is made; what it swaps is put back."""
    ask: Callable[[dict[str, Any]], object] = lambda _config: None
    """Changes DeepSpeed's configuration."""


def adding_to(mutants: list[Mutant]) -> Callable[..., Callable[[Callable[[Any, Swap], None]], None]]:
    """Return a decorator that makes a mutant of a function and adds it to a list: (change, fits)."""

    def mutant(change: str, fits: Fits = lambda _case: True) -> Callable[[Callable[[Any, Swap], None]], None]:
        return lambda alter: mutants.append(Mutant(change, fits, alter))

    return mutant


def asking(change: str, fits: Fits, key: str, value: object) -> Mutant:
    """Return a mutant that asks DeepSpeed for another value; a dot in the key leads into a section."""

    def ask(config: dict[str, Any]) -> None:
        *sections, last = key.split(".")
        for section in sections:
            config = config[section]
        config[last] = value

    return Mutant(change, fits, ask=ask)


def adamw(case: Case) -> bool:
    """Return whether AdamW updates all tensors."""
    return case.optimizer == "adamw"


def accumulates(case: Case) -> bool:
    """Return whether a step has several micro-batches."""
    return case.accumulation > 1


def binds(case: Case) -> bool:
    """Return whether the norm of the gradient is limited to less than it is."""
    return 0 < case.grad_clip < 1


def bf16_optimizer_of(case: Case) -> bool:
    """Return whether DeepSpeed's BF16_Optimizer is at work."""
    return case.stage == 1 and case.precision == "bf16"


def flat(case: Case) -> bool:
    """Return whether its optimizer of stages 1 and 2 is."""
    return case.stage in (1, 2) and not bf16_optimizer_of(case)


def adam_groups(engine: Any) -> list[dict[str, Any]]:
    """Return the groups that AdamW updates."""
    return [group for group in engine.groups if group["algorithm"] == "adamw"]


def after_rates(engine: Any, swap: Swap, change: Callable[[list[dict[str, Any]], float], None]) -> None:
    """Change the optimizer's groups in each step, once the engine has set their learning rates."""
    original = set_learning_rates

    def changed(groups: list[dict[str, Any]], lr: float) -> None:
        original(groups, lr)
        change(adam_groups(engine), lr)

    swap(base, "set_learning_rates", changed)


def scale_loss(engine: Any, swap: Swap, factor: Callable[[int], float]) -> None:
    """Multiply what is differentiated by a factor of the number of the micro-batch, counted over all steps."""
    ds, count = engine._engine, iter(range(10**6))
    backward = ds.backward
    swap(ds, "backward", lambda loss, **named: backward(loss * factor(next(count)), **named))


def around_update(engine: Any, swap: Swap, before: Callable[[], Any], after: Callable[[Any], None]) -> None:
    """Do something before each update, and something with what that returns after it."""
    update = engine._update

    def changed() -> Any:
        kept = before()
        found = update()
        after(kept)
        return found

    swap(engine, "_update", changed)


def before_optimizer(engine: Any, swap: Swap, change: Callable[[Any], None]) -> None:
    """Do something with the optimizer right before each of its steps; DeepSpeed may take one for each group."""
    optimizer = engine._optimizer
    step = optimizer.step

    def changed(*arguments: Any, **named: Any) -> Any:
        change(optimizer)
        return step(*arguments, **named)

    swap(optimizer, "step", changed)


def scale_gradients(optimizer: Any, factor: float) -> None:
    """Multiply all gradients that an optimizer is about to use."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
