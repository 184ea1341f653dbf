"""Train one case by an engine on all ranks and by the plain loop, and compare all that both compute, step by step."""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.nn.functional as F
from torch import Tensor

from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.engine import deepspeed as engines
from plumbline.launcher.runtime.engine.any_ranks import AnyRanksEngine
from plumbline.launcher.runtime.engine.base import UpdateObserver
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.ranks.collectives import gather_objects
from plumbline.launcher.runtime.ranks.world import World
from tests.benchmarks.certificate import models
from tests.benchmarks.certificate.models import Case
from tests.benchmarks.certificate.mutant import Mutant
from tests.benchmarks.certificate.plain import LINEAR, PlainLoop

TOLERANCES = {
    "start": 0.0,
    "loss": 1e-5,
    "gradient": 1e-4,
    "norm": 1e-5,
    "update": 1e-3,
    "state": 2e-4,
    "weights": 0.0,
}
"""Quantity -> how far from the plain loop it may be, as a share of the plain loop's."""
MUON_UPDATE = 0.1
"""The same of a matrix that Muon updates, which it orthogonalises in bf16: a last bit can become a rounding of 2^-9."""
SMALL = 1e-3
"""Share of the whole gradient's norm under which the gradient of a tensor is compared with that share instead."""
SMALL_UPDATE = 0.1
"""Share of AdamW's full step, the learning rate for each element, under which an update is compared with that share
instead: where moments of both signs cancel, what they may differ by is all that is left."""


@dataclass(frozen=True)
class Difference:
    """Hold one difference."""

    share: float
    """Of what is allowed."""
    value: float
    """Of what the plain loop has."""
    where: str


@dataclass
class Differences:
    """Hold the largest difference of each quantity."""

    worst: dict[str, Difference] = field(default_factory=dict)
    exceeded: list[str] = field(default_factory=list)
    """Quantities that differ by more than they may, in the order in which they were found."""

    def add(self, quantity: str, found: float, where: str, tolerance: float | None = None) -> None:
        """Note a difference; a number that is none is the largest."""
        found = math.inf if math.isnan(found) else found
        allowed = TOLERANCES[quantity] if tolerance is None else tolerance
        share = found / allowed if allowed else math.inf if found else 0.0
        self.note(quantity, Difference(share, found, where))
        if share > 1 and quantity not in self.exceeded:
            self.exceeded.append(quantity)

    def note(self, quantity: str, one: Difference) -> None:
        """Keep a difference if it is the largest."""
        if quantity not in self.worst or one.share > self.worst[quantity].share:
            self.worst[quantity] = one

    @property
    def furthest(self) -> str:
        """Name what comes closest to what is allowed, or exceeds it by most."""
        quantity, one = max(self.worst.items(), key=lambda item: item[1].share)
        return f"{quantity} by {one.value:.1e}, {one.share:.0%} of what is allowed ({one.where})"


def make_engine(case: Case, world: World, mutant: Mutant | None, any_ranks: bool) -> DeepSpeedEngine:
    """Return the engine of a run, but for its model and its table, which are the case's.

    A mutant that asks DeepSpeed for something else goes unnoticed by the engine, which would refuse.
    """
    config = models.configuration(case, world.size)
    plan = replace(plan_run(config), rows=models.rows(case))
    asked = engines.deepspeed_config

    def deepspeed_config(*arguments: Any) -> dict[str, Any]:
        found = asked(*arguments)
        if not case.persistent:
            found["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return found

    def asked_wrongly(*arguments: Any) -> dict[str, Any]:
        found = deepspeed_config(*arguments)
        assert mutant is not None
        mutant.ask(found)
        return found

    def build(*arguments: Any, **_restored: bool) -> models.Generated:
        return models.build(case, *arguments[4:6])  # construction and gather, at stage 3

    with ExitStack() as stack:
        stack.enter_context(patch.object(engines, "plan_run", lambda _config: plan))
        stack.enter_context(patch.object(engines, "build_for_training", build))
        if mutant is None:
            stack.enter_context(patch.object(engines, "deepspeed_config", deepspeed_config))
        else:
            stack.enter_context(patch.object(engines, "deepspeed_config", asked_wrongly))
            stack.enter_context(patch.object(DeepSpeedEngine, "_verify", lambda *_: None))
        return (AnyRanksEngine if any_ranks else DeepSpeedEngine)(config, world)


def whole_tensors(engine: DeepSpeedEngine) -> dict[str, dict[str, Tensor]]:
    """Return name -> weight and states, put together from what all ranks keep. Collective."""
    shares = gather_objects(list(_own_parts(engine)), engine.world)
    found: dict[str, dict[str, Tensor]] = {}
    for piece, parts in zip(engine.pieces(), zip(*shares, strict=True), strict=True):
        held = [part for part in parts if part["weight"].numel()]
        for key in held[0]:
            values = [part[key] for part in held]
            whole = key == "step"
            found.setdefault(piece.name, {})[key] = (
                torch.stack(values) if whole else torch.cat(values).view(piece.shape)
            )
    return found


def _own_parts(engine: DeepSpeedEngine) -> Iterator[dict[str, Tensor]]:
    """Yield the part of every tensor for which this rank answers, in the order of `pieces`."""
    for piece in engine.pieces():
        mine = piece.share(engine.world)
        state = engine.optimizer_state.get(mine.shard, {}) if mine.trained else {}
        parts = {
            key: mine.of(value) if value.shape == mine.shard.shape else value
            for key, value in {"weight": mine.shard, **state}.items()
        }
        yield {key: part.float().cpu().clone() for key, part in parts.items()}


class Comparison(UpdateObserver):
    """Compare an engine with the plain loop before and after each update."""

    def __init__(self, engine: DeepSpeedEngine, case: Case) -> None:
        self.engine, self.case, self.found = engine, case, Differences()
        self.plain = PlainLoop(case, engine.plan.settings.betas, engine.world.device)
        self.step, self.norm = 0, 0.0
        self.before = whole_tensors(engine)
        for name, weight in self.plain.weights.items():
            self.found.add("start", _distance(self.before[name]["weight"], weight, 0.0), name)

    def before_update(self) -> None:
        """Compare gradients; at stage 0 DeepSpeed's engine has clipped them."""
        clipped = self.case.stage == 0 and not isinstance(self.engine, AnyRanksEngine)
        if clipped:
            self.norm = self.plain.clip()
        floor = self._small_gradient()
        for row in models.rows(self.case):
            if row.trainable:
                gradient = self.engine.gradient(row.name)
                distance = _distance(gradient, self.plain.gradients[row.name], floor)
                self.found.add("gradient", distance, self._at(row.name))
        if not clipped:
            self.norm = self.plain.clip()

    def after_update(self) -> None:
        """Compare what the update has changed, the states, and what each rank computes with from now on."""
        self.plain.update(self.step)
        after, states, small = whole_tensors(self.engine), self.plain.state(), self._small_gradient()
        for row in models.rows(self.case):
            name, orthogonal = row.name, "momentum_buffer" in states.get(row.name, {})
            then = self.before[name]["weight"].double()
            change = after[name]["weight"].double() - then
            expected = self.plain.weights[name].detach().double().cpu() - then
            # An update, of two or three operations, is seen no more finely than fp32 holds the weight
            floor = 2**-22 * float(then.norm()) / TOLERANCES["update"]
            if row.trainable and not orthogonal:
                full = models.learning_rate(self.step) * row.lr_multiplier * math.sqrt(then.numel())
                floor = max(floor, SMALL_UPDATE * full)
            tolerance = MUON_UPDATE if orthogonal else None
            self.found.add("update", _distance(change, expected, floor), self._at(name), tolerance)
            for key, value in states.get(name, {}).items():
                floor = small**2 if key == "exp_avg_sq" else small
                share = 0.0 if key == "step" else 0.05 * floor  # of a gradient, as much enters a state at least
                self.found.add("state", _distance(after[name].get(key), value, share), f"{self._at(name)}: {key}")
        self._compare_copies(after)
        self.plain.go_on_from({name: held["weight"] for name, held in after.items()})
        self.before = after

    def _compare_copies(self, masters: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Compare what this rank's forward passes read with the master weights, to the last bit."""
        for name, parameter in self.engine.model.named_parameters():
            gathered: AbstractContextManager[object] = nullcontext()
            if self.case.stage == 3:
                gathered = deepspeed.zero.GatheredParameters(parameter)
            with gathered:
                here = parameter.detach().cpu().clone()
            expected = masters[name]["weight"].to(here.dtype)
            self.found.add(
                "weights", _distance(here, expected, 0.0), f"{self._at(name)} on rank {self.engine.world.rank}"
            )

    def _small_gradient(self) -> float:
        """Return the norm under which a gradient is compared with this norm instead of its own."""
        return SMALL * float(torch.stack([gradient.norm() for gradient in self.plain.gradients.values()]).norm())

    def _at(self, name: str) -> str:
        return f"step {self.step + 1}, {name}"


def _distance(found: Tensor | None, expected: Tensor, floor: float) -> float:
    """Return how far a tensor is from another one, as a share of its norm."""
    if found is None:
        return float("inf")
    expected = expected.detach().double().cpu()
    difference = float((found.detach().double().cpu() - expected).norm())
    return difference / max(float(expected.norm()), floor, 1e-30)


def compare(case: Case, world: World, mutant: Mutant | None = None, any_ranks: bool = False) -> Differences:
    """Train a case on all ranks, and return the largest differences that any rank has seen. Collective.

    Args:
        case: what is trained.
        world: this process among all.
        mutant: what is broken meanwhile.
        any_ranks: whether the engine is that of `run.reproducible: any_ranks`.
    """
    F.linear = LINEAR
    with ExitStack() as stack:
        engine = make_engine(case, world, mutant, any_ranks)
        if mutant is not None:
            mutant.alter(engine, lambda place, name, new: stack.enter_context(patch.object(place, name, new)))
        comparison = Comparison(engine, case)
        for step in range(models.STEPS):
            batches = models.micro_batches(case, step, world.size)
            comparison.step = step
            loss = comparison.plain.backward(batches, step)
            result = engine.train_step(batches[world.rank], step, models.learning_rate(step), [comparison]).result
            where = f"step {step + 1}"
            comparison.found.add("loss", abs(float(result.loss) - loss) / abs(loss), where)
            comparison.found.add("norm", abs(result.grad_norm - comparison.norm) / comparison.norm, where)
    engine._engine.destroy()
    return merged(gather_objects(comparison.found, world))


def merged(found: list[Differences]) -> Differences:
    """Return the largest of what several ranks have seen."""
    total = Differences()
    for one in found:
        for quantity, difference in one.worst.items():
            total.note(quantity, difference)
        total.exceeded += [quantity for quantity in one.exceeded if quantity not in total.exceeded]
    return total
