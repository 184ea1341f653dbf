"""Score the model in training on held-out data: as it is, with thoughts, in int8 arithmetic, and its moving average."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from plumbline.launcher.runtime.engine.base import Engine
from plumbline.launcher.runtime.ranks.collectives import AllRanksError, any_rank, sum_over_ranks
from plumbline.launcher.runtime.run.inputs import Inputs
from plumbline.launcher.runtime.scoring.scores import HeldOutLoss, held_out_loss
from plumbline.launcher.runtime.system.signals import StopRequest
from plumbline.model.objectives.objective import Batch
from plumbline.model.quantization.layers import quantized_linears
from plumbline.model.quantization.quantizer import Quantizer

INT8 = Quantizer(format="int8")
INT8_BATCHES = 2  # held-out micro-batches per rank also scored with int8 weights and activations


class StoppedError(AllRanksError):
    """Signal that a rank was asked to stop during an evaluation; all ranks leave it at the same batch."""


class Evaluation:
    """Score the model of an engine on the held-out part of every corpus and task. All ranks call all methods.

    Args:
        engine: the engine with the model.
        inputs: the run's inputs, with held-out data.
        stop: checked before each batch.
        heartbeat: called with a description of each batch.
    """

    def __init__(self, engine: Engine, inputs: Inputs, stop: StopRequest, heartbeat: Callable[[str], None]) -> None:
        self.engine, self.inputs, self.stop, self.heartbeat = engine, inputs, stop, heartbeat

    def run(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Return the entries of metrics.jsonl: eval/NAME/loss and so on.

        Args:
            say: called with a line for each score.

        Raises:
            StoppedError: a rank was asked to stop.
        """
        record: dict[str, Any] = {}
        for name in self.inputs.validation:
            scores = self._score(name)
            record |= scores.metrics(name)
            say(f"held-out loss of {name} {scores.describe()}")
            if self.engine.model.objective.thinks:
                scores = self._score(name, thinking=True)
                record |= scores.thinking_metrics(name)
                say(f"held-out loss of {name} {scores.describe()}, thinking")
            # The int8 delta is only meaningful for models that do not round by themselves
            if self.engine.config.metrics.diagnostics_interval is not None and self.engine.config.precision.is_plain:
                record[f"eval/{name}/w8a8_delta"] = self._int8_delta(name)
        if self.engine.ema is not None:
            with self.engine.ema.in_place():
                for name in self.inputs.validation:
                    loss = record[f"eval/{name}/ema_loss"] = self._score(name).loss
                    say(f"held-out loss of {name} {loss:.4f}, moving average")
        return record

    def _int8_delta(self, name: str) -> float:
        """Return what int8 weights and activations in the blocks add to the loss, nats per token."""
        exact = self._score(name, limit=INT8_BATCHES)
        with quantized_linears(self.engine.model.model.layers, INT8, INT8):
            rounded = self._score(name, limit=INT8_BATCHES)
        return rounded.loss - exact.loss

    def _score(self, name: str, thinking: bool = False, limit: int | None = None) -> HeldOutLoss:
        """Return the scores on the held-out part of one source, or on the first `limit` batches of each rank."""
        split, batches = self.inputs.validation[name]
        mine = self._until_stopped(islice(batches, limit))
        return held_out_loss(self.engine, mine, split, thinking, self._sum_over_ranks)

    def _until_stopped(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.heartbeat("evaluating")
            if any_rank(bool(self.stop), self.engine.world):
                raise StoppedError
            yield batch

    def _sum_over_ranks(self, sums: list[float]) -> list[float]:
        device = self.engine.world.device
        total: list[float] = sum_over_ranks(torch.tensor(sums, dtype=torch.float64, device=device)).tolist()
        return total
