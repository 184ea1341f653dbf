"""End a run, before its update, when two ranks compute different bits from the same micro-batch.

A device that silently computes wrong numbers ruins a run, because its gradient is averaged with those of the others. So
at an interval one micro-batch of every rank is computed twice: by its owner during training, which takes checksums of
the gradients where they arise, and by the next rank, from the same tokens, random numbers and weights. If the two
differ, a third rank computes it as well, and the rank whose bits differ from those of the other two is named.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from plumbline.launcher.runtime.cluster.nodes import node_name
from plumbline.launcher.runtime.engine.base import Engine
from plumbline.launcher.runtime.ranks.checksum import checksum, checksums
from plumbline.launcher.runtime.ranks.collectives import any_rank, gather_objects, gather_rows, shift
from plumbline.launcher.runtime.train.guards.guard import Guard, WrongNodeError
from plumbline.launcher.runtime.train.guards.replicas import name_ranks
from plumbline.model.objectives.objective import Batch, Losses, TrainedLM

BESIDE = ("the loss", "the reports")
"""What is compared in addition to the gradients of the tensors."""


@dataclass(frozen=True)
class Work:
    """Hold the inputs of a micro-batch's computation, except for weights and others that all ranks share."""

    batch: Batch
    random: list[Tensor]
    """States of the random generators: the CPU's, and the device's if it has one."""

    def shift(self, distance: int, engine: Engine) -> "Work":
        """Return the work of the rank that is `distance` before this one. Collective."""
        tensors = [*self.batch.values(), *self.random]
        came = [shift(tensor, distance, engine.world) for tensor in tensors]
        split = len(self.batch)
        return Work(dict(zip(self.batch, came[:split], strict=True)), came[split:])


class Replay(Guard):
    """Compare the bits that ranks compute: with deterministic kernels, at ZeRO stages 0 to 2.

    Args:
        engine: the engine that trains.
        interval: steps from one comparison to the next.
    """

    name = "replay"

    def __init__(self, engine: Engine, interval: int) -> None:
        self._engine, self._interval = engine, interval
        self._step = 0
        self._recording: Recording | None = None

    def before_step(self, step: int, micro_batches: int) -> None:
        """Record one of the next step's micro-batches, a different one at each interval."""
        self._step = step
        if step % self._interval == 0:
            self._recording = Recording(self._engine, step // self._interval % micro_batches)

    def before_update(self) -> None:
        """Compare what was recorded. Raises WrongNodeError on all ranks if two of them differ. Collective."""
        if self._recording is None:
            return
        recording, self._recording = self._recording, None
        recording.end()
        engine, work, own = self._engine, recording.work, recording.sums
        again = self._compute(work.shift(1, engine), recording)
        if not any_rank(not torch.equal(again, shift(own, 1, engine.world)), engine.world):
            return
        third = self._compute(work.shift(2, engine), recording)
        results = gather_rows(torch.stack((own, again, third)), engine.world)  # [ranks, 3, rows, 2]
        hosts = gather_objects(node_name(), engine.world)
        raise _error(self._step, results, [*BESIDE, *recording.names], hosts)

    def _compute(self, work: Work, mine: "Recording") -> Tensor:
        """Return the checksums of loss, reports and gradients of another rank's micro-batch, computed on this one."""
        device = self._engine.world.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            _set_random(work.random, device)
            loss, reports, gradients = self._engine.local_gradient(work.batch, mine.step, mine.weights)
        return checksums((loss, reports, *gradients), device)


class Recording:
    """Record what this rank computes from one micro-batch while it trains on it.

    Args:
        engine: the engine that trains.
        number: index of the micro-batch in the step.

    Attributes:
        names: of the trained tensors.
        sums: checksums of loss, reports and gradients, [2 + tensors, 2]; a missing gradient counts as zeros.
        work: inputs of the micro-batch's computation.
        step: completed steps.
        weights: of the terms of the loss, as they arrive in the backward pass, [terms].
    """

    work: Work
    step: int
    weights: Tensor

    def __init__(self, engine: Engine, number: int) -> None:
        model, trained, self._device = engine.model, engine.trained(), engine.world.device
        self.names = list(trained)
        self.sums = torch.zeros(len(BESIDE) + len(trained), 2, dtype=torch.int64, device=self._device)
        self._until = number + 1
        self._hooks: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True),
        ]
        for row, parameter in enumerate(trained.values(), len(BESIDE)):
            self._hooks.append(parameter.register_hook(partial(self._gradient, row)))

    def end(self) -> None:
        """Stop recording."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, _model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if named.get("through") is not TrainedLM.losses:
            return
        self._until -= 1
        if self._until == 0:
            batch, self.step = inputs
            self.work = Work(dict(batch), _random(self._device))

    def _after(self, _model: nn.Module, _inputs: object, named: dict[str, Any], losses: Losses) -> None:
        if named.get("through") is TrainedLM.losses and self._until == 0:
            self.sums[: len(BESIDE)] = checksums((losses.cross_entropy, losses.reports), self._device)
            losses.terms.register_hook(self._keep_weights)

    def _keep_weights(self, weights: Tensor) -> None:
        self.weights = weights

    def _gradient(self, row: int, gradient: Tensor) -> None:
        if self._until == 0:
            self.sums[row] = checksum(gradient)


def wrong_ranks(results: Sequence[Sequence[Hashable]]) -> dict[int, list[int]]:
    """Return owner -> ranks that computed its micro-batch wrong, for each owner whose micro-batch has two results.

    A result is right if two ranks have it. If no two agree, all ranks that computed it are named. With two ranks, the
    owner is also the third, and may repeat a wrong result, so its agreement with itself does not count.

    Args:
        results: for each rank, its results for its own micro-batch, for that of the rank before, and for that of the
            rank before that one.
    """
    found, size = {}, len(results)
    for owner in range(size):
        ranks = [(owner + distance) % size for distance in range(3)]
        got: dict[Hashable, set[int]] = defaultdict(set)
        for distance, rank in enumerate(ranks):
            got[results[rank][distance]].add(rank)
        if results[ranks[0]][0] != results[ranks[1]][1]:
            right = next((result for result, who in got.items() if len(who) > 1), None)
            found[owner] = sorted({rank for result, who in got.items() if result != right for rank in who})
    return found


def _error(step: int, results: Tensor, names: Sequence[str], hosts: Sequence[str]) -> WrongNodeError:
    """Return the error that names the wrong ranks; `results` [ranks, 3, rows, 2] is as in `wrong_ranks`."""
    wrong = wrong_ranks([[result.numpy().tobytes() for result in rank] for rank in results.cpu()])
    owner = min(wrong)
    named = sorted({rank for ranks in wrong.values() for rank in ranks})
    rows = (results[owner, 0] != results[(owner + 1) % len(hosts), 1]).any(-1).nonzero().flatten().tolist()
    # If loss and reports agree, the first gradient of the backward pass that differs
    what = names[rows[0] if rows[0] < len(BESIDE) else rows[-1]] + (f" and {len(rows) - 1} more" if rows[1:] else "")
    if any(len(ranks) == min(3, len(hosts)) for ranks in wrong.values()):
        verdict = "got different bits, and no two agree on which are right"
    else:
        verdict = "got other bits than two ranks agree on"
    return WrongNodeError(
        f"step {step}: {name_ranks(named, hosts)} {verdict}, for a micro-batch of rank {owner}: {what}. The update was "
        f"not made; the last checkpoint is from before.",
        sorted({hosts[rank] for rank in named}),
    )


def _random(device: torch.device) -> list[Tensor]:
    """Return the states of the random generators, on the device, so that ranks can send them."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return [state.to(device) for state in states]


def _set_random(states: Sequence[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0].cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1].cpu(), device)
