"""Break what an optimizer makes of gradients: hyperparameters of groups, states, master weights."""

from typing import Any

from plumbline.launcher.runtime.engine import base
from plumbline.launcher.runtime.optim import muon
from plumbline.launcher.runtime.optim.optimizer import set_learning_rates
from tests.benchmarks.certificate.mutant import (
    Mutant,
    Swap,
    adam_groups,
    adamw,
    adding_to,
    after_rates,
    around_update,
    before_optimizer,
)

MUTANTS: list[Mutant] = []
mutant = adding_to(MUTANTS)

# Hyperparameters of groups


@mutant("the learning rate of one group is 2 % too high")
def _(engine: Any, swap: Swap) -> None:
    after_rates(engine, swap, lambda groups, _lr: groups[-1].update(lr=groups[-1]["lr"] * 1.02))


@mutant("all groups have one learning rate")
def _(engine: Any, swap: Swap) -> None:
    def one_rate(groups: list[dict[str, Any]], lr: float) -> None:
        for group in groups:
            group["lr"] = lr

    after_rates(engine, swap, one_rate)


@mutant("two groups have swapped their learning rates")
def _(engine: Any, swap: Swap) -> None:
    def change(groups: list[dict[str, Any]], _lr: float) -> None:
        groups[0]["lr"], groups[1]["lr"] = groups[1]["lr"], groups[0]["lr"]

    after_rates(engine, swap, change)


@mutant("the learning rate is that of the step before")
def _(engine: Any, swap: Swap) -> None:
    earlier: list[float] = []
    original = set_learning_rates

    def changed(groups: list[dict[str, Any]], lr: float) -> None:
        earlier.append(lr)
        original(groups, earlier[-2:][0])

    swap(base, "set_learning_rates", changed)


@mutant("one group is not updated")
def _(engine: Any, swap: Swap) -> None:
    after_rates(engine, swap, lambda groups, _lr: groups[0].update(lr=0.0))


@mutant("weight decay on the group that has none")
def _(engine: Any, _swap: Swap) -> None:
    next(group for group in adam_groups(engine) if not group["weight_decay"])["weight_decay"] = 0.1


@mutant("no weight decay on a group that has it")
def _(engine: Any, _swap: Swap) -> None:
    next(group for group in adam_groups(engine) if group["weight_decay"])["weight_decay"] = 0.0


@mutant("two groups have swapped their eps")
def _(engine: Any, _swap: Swap) -> None:
    one, other = adam_groups(engine)[:2]
    one["eps"], other["eps"] = other["eps"], one["eps"]


@mutant("the second beta is 0.999")
def _(engine: Any, _swap: Swap) -> None:
    for group in adam_groups(engine):
        group["betas"] = (group["betas"][0], 0.999)


@mutant("the decay is a part of the gradient, as in Adam", adamw)
def _(engine: Any, _swap: Swap) -> None:
    for group in engine.groups:
        group["decoupled_weight_decay"] = False


# Adam's state


@mutant("all groups share one count of Adam's steps", adamw)
def _(engine: Any, swap: Swap) -> None:
    def change(_optimizer: Any) -> None:
        states = [state for state in engine.optimizer_state.values() if "step" in state]
        for state in states:
            state["step"] = states[0]["step"]

    before_optimizer(engine, swap, change)


@mutant("Adam's count of steps is one ahead")
def _(engine: Any, swap: Swap) -> None:
    def ahead(_kept: None) -> None:
        if engine._optimizer.__dict__.setdefault("ahead", False) is False:
            engine._optimizer.ahead = True
            for state in engine.optimizer_state.values():
                if "step" in state:
                    state["step"] += 1

    around_update(engine, swap, lambda: None, ahead)


@mutant("Adam's second moment is kept in bf16")
def _(engine: Any, swap: Swap) -> None:
    def rounded(_kept: None) -> None:
        for state in engine.optimizer_state.values():
            if "exp_avg_sq" in state:
                state["exp_avg_sq"].copy_(state["exp_avg_sq"].bfloat16())

    around_update(engine, swap, lambda: None, rounded)


@mutant("the master weights are kept in bf16")
def _(engine: Any, swap: Swap) -> None:
    def rounded(_kept: None) -> None:
        for weights in engine.master_weights():
            weights.data.copy_(weights.data.bfloat16())
        engine.refresh_weights()

    around_update(engine, swap, lambda: None, rounded)


@mutant("Muon's momentum is 0.8", lambda case: case.optimizer == "muon")
def _(engine: Any, _swap: Swap) -> None:
    for group in engine.groups:
        if group["algorithm"] == "muon":
            group["momentum"] = 0.8


@mutant("Muon's update is a third too large", lambda case: case.optimizer == "muon" and case.stage > 0)
def _(_engine: Any, swap: Swap) -> None:
    original = muon.orthogonal_step
    swap(muon, "orthogonal_step", lambda update: original(update) * 4 / 3)
