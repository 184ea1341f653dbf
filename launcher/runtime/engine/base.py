"""Define the interface of an engine for training, and the optimizer step that every engine takes.

`deepspeed.py` implements it for ZeRO stages 0 to 3, `plain.py` in plain PyTorch for one process. Code that trains,
evaluates, averages, observes or saves uses only `Engine` and does not know how weights are sharded.

Methods marked "Collective" communicate between ranks: all ranks must call them, in the same order.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.load import as_yaml
from plumbline.launcher.runtime.config.plan import RunPlan
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.pieces import Piece
from plumbline.launcher.runtime.engine.step_result import StepUnderWay
from plumbline.launcher.runtime.optim.moving_average import MovingAverage
from plumbline.launcher.runtime.optim.optimizer import set_learning_rates
from plumbline.launcher.runtime.ranks.collectives import sum_over_ranks
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.scoring.scores import LossSums, loss_sums
from plumbline.model.objectives.objective import Batch, TrainedLM

T = TypeVar("T")


class UpdateObserver(Protocol):
    """Observe an optimizer update without changing it; all ranks observe the same steps."""

    def before_update(self) -> None:
        """Observe weights and gradients, which are already reduced over ranks; collective calls are allowed."""

    def after_update(self) -> None:
        """Observe the weights after the update was applied or skipped; collective calls are allowed."""


class Engine(ABC):
    """Train and evaluate a model with its objective and optimizer, however they are sharded.

    Args:
        config: the run.
        plan: what it will do.
        world: this process among all; the process group must be up.
        model: the model with its objective. Its parameters may be sharded, so only the engine calls it.
    """

    settings: dict[str, dict[str, Any]]
    """Hyperparameters of the optimizer's groups from the parameterization's table, by group name."""

    def __init__(self, config: Config, plan: RunPlan, world: World, model: TrainedLM) -> None:
        self.config, self.plan, self.world, self.model = config, plan, world, model
        half_life = config.train.ema_half_life_tokens
        self.ema = None if half_life is None else MovingAverage(self.master_weights(), self.refresh_weights, half_life)
        """Moving average of the weights, if the run keeps one."""

    @cached_property
    def written_config(self) -> str:
        """Return the configuration as checkpoints hold it: to write it takes as long as to copy a small model."""
        return as_yaml(self.config)

    # -- training and evaluation ---------------------------------------------------------------------------------------

    def train_step(
        self,
        micro_batches: Sequence[Batch],
        step: int,
        lr: float,
        observers: Sequence[UpdateObserver] = (),
        flag: Callable[[], bool] = lambda: False,
    ) -> StepUnderWay:
        """Take one optimizer step: forward and backward over this rank's micro-batches, then the update. Collective.

        Nothing here waits for the device, unless there are observers or the run keeps a moving average of the weights,
        which needs to know whether the update was applied. docs/performance.md counts the cost of a step.

        Args:
            micro_batches: all micro-batches of this rank in this step.
            step: completed steps so far; seeds dropout, so no random state needs saving.
            lr: base learning rate of this step, which each parameter group multiplies.
            observers: called right before and right after the update.
            flag: called once the step is launched; the step's result says whether it was true on any rank.

        Raises:
            ConfigError: a term of the loss has no target in the first step.
        """
        model, objective = self.model, self.model.objective
        if not model.training:  # visiting every module costs host time
            model.train()
        self._seed(step, self.world.rank)
        set_learning_rates(self.groups, lr)
        objective.on_step(model, step)
        batches = [self._to_device(batch) for batch in micro_batches]
        # Each term of the loss is normalised by its targets in the global batch: ignored labels have no weight, and
        # accumulation and world size make no difference.
        targets = sum_over_ranks(torch.stack([objective.targets(batch) for batch in batches]).sum(0).float())  # (terms)
        if step == 0:
            self._check_targets(targets)
        total, reports = self._make_gradient(batches, step, targets.clamp_min(1))
        for observer in observers:
            observer.before_update()
        with record_function("step: update"):
            grad_norm, applied = self._update()
        for observer in observers:
            observer.after_update()
        if self.ema is not None and applied:
            self.ema.update(self.world.size * sum(batch["input_ids"].numel() for batch in batches))
        return StepUnderWay(total, reports, flag(), targets[0], grad_norm, applied)

    def _seed(self, step: int, place: int) -> None:
        """Seed dropout from the run's seed, a step and a position in it.

        `torch.manual_seed` would also seed types of devices that are absent, and format the stack for each.
        """
        seed = hash((self.config.run.seed, step, place))
        torch.default_generator.manual_seed(seed)
        if self.world.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _make_gradient(self, batches: Sequence[Batch], step: int, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradient of a step from this rank's micro-batches on the device. Collective.

        Args:
            batches: the micro-batches.
            step: completed steps so far.
            targets: number of targets of each term of the loss in the global batch, [terms]; the term's divisor.

        Returns:
            This rank's summed cross-entropy, a scalar, and its reports, [reports, 2].
        """
        weights = self.world.size / targets  # gradients are averaged over ranks
        total = torch.zeros((), device=self.world.device)
        reports = torch.zeros(len(self.model.objective.reports), 2, device=self.world.device)
        self._expect_micro_batches(len(batches))
        for batch in batches:
            cross_entropy, reported = self._accumulate(batch, step, weights)
            total += cross_entropy
            reports += reported
        return total, reports

    def local_gradient(self, batch: Batch, step: int, weights: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Compute the gradient of one micro-batch on this rank alone, without adding it to the step's.

        Nothing is communicated, and no hook of an engine runs. Weights must be whole, so not at ZeRO stage 3.

        Args:
            batch: on the device.
            step: completed steps so far; seeds what the objective draws.
            weights: of the terms of the loss, [terms].

        Returns:
            The summed cross-entropy, the reports of `Objective.forward`, and the gradient of
            `(losses * weights).sum()` for every trained tensor in the order of the model, zero where it has none.
        """
        with self._forward_context():
            losses = self.model(batch, step, through=TrainedLM.losses)
        trained = tuple(self.trained().values())
        found = torch.autograd.grad((losses.terms * weights).sum(), trained, materialize_grads=True)
        return losses.cross_entropy.detach(), losses.reports.detach(), list(found)

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trained tensors by name, in the order of the model."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def _check_targets(self, targets: Tensor) -> None:
        """Refuse a term of the loss, other than the text's, without a target in a whole batch; `targets` [terms]."""
        objective = self.model.objective
        if tuple(targets.shape) != (len(objective.terms),):
            found, expected = list(targets.shape), [len(objective.terms)]
            raise TypeError(f"{type(objective).__name__}: targets of shape {found}, expected {expected}")
        for term, count in zip(objective.terms[1:], targets[1:].tolist(), strict=True):
            if not count:
                raise ConfigError(
                    f"objective.name = {self.config.objective.name}: no token of the first batch has a target for the "
                    f"loss of {term}: lower objective.horizon to the length of an answer or a document, or set another "
                    "objective.anchor_policy"
                )

    def evaluate(self, batch: Batch, thinking: bool = False) -> LossSums:
        """Return the sums of the loss on this rank's batch. Collective.

        Args:
            batch: one micro-batch.
            thinking: predict with the objective's thoughts instead of with the plain model.
        """
        batch = self._to_device(batch)
        method = TrainedLM.thinking_cross_entropy if thinking else TrainedLM.cross_entropy
        return loss_sums(self._evaluate(method, batch), batch["labels"])

    def logits(self, batch: Batch, thinking: bool = False) -> Tensor:
        """Return the logits after each token of this rank's batch: [B, T, V], fp32. Collective.

        All of them are held in memory at once. The arguments are those of `evaluate`.
        """
        method = TrainedLM.thinking_logits if thinking else TrainedLM.logits
        return self._evaluate(method, self._to_device(batch))

    @torch.no_grad()
    def _evaluate(self, method: Callable[[TrainedLM, Batch], Tensor], batch: Batch) -> Tensor:
        """Return the result of a model method on a batch, in evaluation mode on the device."""
        self.model.eval()
        return self._call(method, batch)

    def _to_device(self, batch: Batch) -> Batch:
        """Return the batch on this rank's device; copies from pinned memory are asynchronous."""
        return {name: tensor.to(self.world.device, non_blocking=True) for name, tensor in batch.items()}

    def _forward_context(self) -> AbstractContextManager[object]:
        """Return the context in which the model computes as the run does: autocast where weights stay in fp32."""
        if self.config.deepspeed.precision == "bf16" and next(self.model.parameters()).dtype == torch.float32:
            return torch.autocast(self.world.device.type, torch.bfloat16)
        return nullcontext()

    def close(self) -> None:  # noqa: B027 - not every engine holds something
        """Let go of whatever keeps the weights in memory after this object; it cannot be used any more."""

    # What subclasses implement for `train_step` and evaluation

    @abstractmethod
    def _expect_micro_batches(self, count: int) -> None:
        """Prepare for a step of `count` calls of `_accumulate`, then one of `_update`."""

    @abstractmethod
    def _accumulate(self, batch: Batch, step: int, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Add the gradient of `(losses * weights).sum()` on one micro-batch to the step's gradient.

        After the last micro-batch the latter is the mean over ranks. Returns the cross-entropy and the reports of
        `Objective.forward`.
        """

    @abstractmethod
    def _update(self) -> tuple[Tensor, Tensor]:
        """Clip the gradient and update. Returns the norm before clipping, and 1 if the update was applied, else 0.

        Both are scalars on the device.
        """

    @abstractmethod
    def _call(self, method: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a model method, called in a way that gathers the weights it needs."""

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups, as the running optimizer sees them."""

    @abstractmethod
    def master_weights(self) -> list[Tensor]:
        """Return this rank's share of the fp32 master weights: what the optimizer updates, of any shape.

        They are not copies. After writing to them, call `refresh_weights`.
        """

    @abstractmethod
    def refresh_weights(self) -> None:
        """Make the model compute with the master weights as they are now, rounded and gathered. Collective."""

    @abstractmethod
    def pieces(self) -> list[Piece]:
        """Return this rank's part of every tensor of the model, trained or not, in the order of the model."""

    def master_pieces(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of every trained tensor and this rank's piece of its master weights.

        Each piece is flat, perhaps empty, and not a copy; the pieces of all ranks, concatenated, are the tensor.
        """
        for piece in self.pieces():
            if piece.trained:
                mine = piece.share(self.world)
                yield mine.name, mine.of(mine.shard)

    def replicas(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of everything that every rank holds whole and that must be bit-identical on all ranks.

        These are the weights that the next forward pass reads, if they are gathered already (ZeRO-3 keeps only small
        tensors whole), and the unsharded states of the optimizer and the moving average. They are not copies. Step
        counts of shards are left out: after a resume, the count of a shard that is all padding may be any number.
        """
        for name, parameter in self.model.named_parameters():
            if self._is_whole(parameter):
                yield name, parameter
        yield from self.model.named_buffers()
        for number, shard in enumerate(self._undivided()):
            for key, value in self.optimizer_state.get(shard, {}).items():
                if isinstance(value, Tensor):
                    yield f"{key} of master weight {number}", value
            if self.ema is not None:
                yield f"average of master weight {number}", self.ema.of(shard)

    def _undivided(self) -> list[Tensor]:
        """Return the master weights that every rank keeps whole."""
        whole = {id(piece.shard) for piece in self.pieces() if piece.is_replicated}
        return [shard for shard in self.master_weights() if id(shard) in whole]

    def counts(self) -> list[Any]:
        """Return the Python numbers that control updates, equal on all ranks: learning rates, step counts."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.groups]
        states = (self.optimizer_state.get(shard, {}) for shard in self._undivided())
        numbers = [{key: value for key, value in state.items() if not isinstance(value, Tensor)} for state in states]
        return [groups, numbers, None if self.ema is None else self.ema.tokens]

    @abstractmethod
    def _is_whole(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank keeps a whole parameter of the model between steps."""

    @property
    @abstractmethod
    def optimizer_state(self) -> MutableMapping[Tensor, dict[str, Any]]:
        """Return the optimizer's state by shard (`Piece.shard`); empty until the first update.

        A value of the shard's shape is elementwise. Any other, such as a step count, belongs to all tensors of the
        shard. The state may be written to.
        """

    @abstractmethod
    def gradient(self, name: str) -> Tensor:
        """Return the whole gradient of a tensor, averaged over ranks. Collective; only between backward and update.

        Some engines have clipped it by then.
        """
