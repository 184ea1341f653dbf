"""Record how far the table of the parameterization is in force, and warn where it is not as in the base run.

Hyperparameters carry over from a small model as long as each role of tensor moves as its row of the table says. So the
size of an update is taken over the one that the optimizer's state implies (`OptimizerKind.unit_update`):

    size(role) = rms((W' - W + lr decay W) / lr) / rms(unit)       lr, decay: of the row, at this step

For AdamW, unit = m / sqrt(v) with the bias corrections of this step, so that the size is 1 where eps is small beside
sqrt(v), at any width, depth, data and step; how far below 1 it is shows how much eps takes away, which is the same at
all sizes where eps follows the table. A rate that never reached the optimizer, an eps that does not scale, and a count
of Adam's steps that several groups share move it; how the gradients look does not.

Updates 1, 2, 4, 8, ... are looked at: what is wrong from the start is seen there, and the rest costs nothing.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plumbline.data.damage import DamagedFileError
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.guards import TransferConfig
from plumbline.launcher.runtime.engine.base import Engine
from plumbline.launcher.runtime.engine.pieces import Piece
from plumbline.launcher.runtime.engine.step_result import StepResult
from plumbline.launcher.runtime.optim.optimizer import OPTIMIZERS
from plumbline.launcher.runtime.run.metrics import read_metrics
from plumbline.launcher.runtime.system.collectives import from_main, sum_over_ranks
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.train.guards.guard import Guard

SIZE = "step_size/"  # of a role, in metrics.jsonl
RATIO = "transfer/"  # of its size to that in the base run
DIGITS = 6  # significant ones in a record

Sizes = Mapping[int, Mapping[str, float]]
"""Step -> role -> size of its update."""


class Transfer(Guard):
    """Measure the sizes of updates by role, and compare them with those of the base run. All ranks make one together.

    From before an update that is looked at until after it, a copy of this rank's share of the weights is held.

    Args:
        engine: what trains.
        settings: which run is the base, and how far a size may be from that of the base.

    Raises:
        ConfigError: the base run has no such sizes.
    """

    name = "transfer"

    def __init__(self, engine: Engine, settings: TransferConfig) -> None:
        self._engine, self._factor = engine, settings.factor
        self._base = from_main(partial(read_base, settings), engine.world)  # a long log, which one rank reads
        groups = {name: group for group in engine.settings.values() for name in group["parameters"]}
        self._rows = {
            row.name: (row, groups[row.name], unit_update)
            for row in engine.plan.rows
            if row.trainable and (unit_update := OPTIMIZERS[groups[row.name]["algorithm"]].unit_update) is not None
        }
        self._roles = sorted({row.role for row, *_ in self._rows.values()})
        self._step, self._lr, self._skipped = 0, 0.0, 0
        self._before: dict[str, Tensor] = {}
        self._sums: dict[int, Tensor] = {}  # of steps that were looked at and not read yet
        self._outside: set[str] = set()

    def before_step(self, step: int, _micro_batches: int) -> None:
        """Remember which step comes, and the base learning rate that the schedule has for it."""
        plan = self._engine.plan
        self._step, self._lr = step, plan.lr_after(plan.batch_plan.tokens_before(step - 1))

    @torch.no_grad()
    def before_update(self) -> None:
        """Keep the weights, if this update is looked at."""
        if self._lr and self._step & (self._step - 1) == 0:
            self._before = {name: weight.clone() for name, weight in self._engine.master_pieces() if name in self._rows}

    @torch.no_grad()
    def after_update(self) -> None:
        """Sum the squares of the updates and of the unit updates, by role. Collective, if this update is looked at."""
        if not self._before:
            return
        sums = torch.zeros(len(self._roles), 2, dtype=torch.float64, device=self._engine.world.device)
        for piece in self._engine.pieces():
            if piece.name in self._before:
                row, *_ = self._rows[piece.name]
                sums[self._roles.index(row.role)] += self._squares(piece.share(self._engine.world)).to(sums.device)
        self._before = {}
        self._sums[self._step] = sum_over_ranks(sums)

    def _squares(self, piece: Piece) -> Tensor:
        """Return the sums of squares, [2], of the update of this rank's part of a tensor and of its unit update."""
        row, group, unit_update = self._rows[piece.name]
        lr, before, state = self._lr * row.lr_multiplier, self._before[piece.name], self._engine.optimizer_state
        of_shard = {key: value for key, value in state.get(piece.shard, {}).items() if _is_like(value, piece.shard)}
        if not (of_shard and lr):  # no update was applied yet, or none is meant to be
            return before.new_zeros(2, dtype=torch.float64)
        update = (piece.of(piece.shard) - before * (1 - lr * row.weight_decay)) / lr
        unit = unit_update({key: piece.of(value) for key, value in of_shard.items()}, group, self._step - self._skipped)
        return torch.stack([values.square().sum(dtype=torch.float64) for values in (update, unit)])

    def after_step(self, _step: int, result: StepResult) -> None:
        """Count skipped updates, which Adam's own count of steps leaves out, and drop what was measured of them.

        A step that was looked at before this one was read had a count too many, and is forgotten as well.
        """
        if not result.applied:
            self._skipped += 1
            self._sums.clear()

    def found(self, step: int) -> dict[str, float]:
        """Return the sizes by role, and their ratios to those of the base run; warn of each that leaves its band."""
        if step not in self._sums:
            return {}
        pairs = zip(self._roles, self._sums.pop(step).tolist(), strict=True)
        sizes = {role: (update / unit) ** 0.5 for role, (update, unit) in pairs if update and unit}
        latest = max((known for known in self._base if known <= step), default=None)
        expected = {} if latest is None else self._base[latest]
        ratios: dict[str, float] = {role: size / expected[role] for role, size in sizes.items() if role in expected}
        self._warn(step, ratios)
        named = {f"{SIZE}{role}": size for role, size in sizes.items()}
        named |= {f"{RATIO}{role}": ratio for role, ratio in ratios.items()}
        return {key: float(f"{value:.{DIGITS}g}") for key, value in named.items()}

    def _warn(self, step: int, ratios: Mapping[str, float]) -> None:
        """Warn of the roles that left their bands; of one that was outside already only once it was back."""
        outside = {role for role, ratio in ratios.items() if not 1 / self._factor <= ratio <= self._factor}
        new = ", ".join(f"{role} ({ratios[role]:.3g})" for role in sorted(outside - self._outside))
        if new:
            LOG.warning(
                f"step {step}: sizes of updates are not those of the base run: {new} times as large, over what the "
                "table of the parameterization asks for: a learning rate, an eps or a count of Adam's steps is not the "
                "table's (guards.transfer, docs/guards.md)"
            )
        self._outside = outside

    @property
    def state(self) -> dict[str, Any]:
        """Return how many updates were skipped, and the roles that are outside of their bands."""
        return {"skipped": self._skipped, "outside": sorted(self._outside)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on counting, and remember of which roles the log has been told."""
        self._skipped, self._outside = int(state.get("skipped", 0)), set(map(str, state.get("outside", ())))


def _is_like(value: Any, shard: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == shard.shape


def read_base(settings: TransferConfig, most: int | None = None) -> Sizes:
    """Return the sizes of updates that the base run logged; without a base, none.

    Args:
        settings: name the base.
        most: steps to read the sizes of, from the first one on; None: all, for which the whole log is read.

    Raises:
        ConfigError: it logged none, or is no run.
        DamagedFileError: a line of its log is damaged.
    """
    if settings.base is None:
        return {}
    file = Path(settings.base) / "metrics.jsonl"
    if not file.is_file():
        raise ConfigError(f"guards.transfer.base = {settings.base}: {file} is not there: name the folder of a run")
    sizes = dict(islice(_sizes_in(file), most))
    if not sizes:
        raise ConfigError(
            f"guards.transfer.base = {settings.base}: {file} has no {SIZE}ROLE, so it is of a version of Plumbline "
            "before this guard, or of a run without a step: train the base again"
        )
    return sizes


def _sizes_in(file: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield each step whose update was looked at, and role -> size."""
    for step, record in read_metrics(file):
        found = {key.removeprefix(SIZE): value for key, value in record.items() if key.startswith(SIZE)}
        for role, value in found.items():
            if not isinstance(value, int | float) or value <= 0:
                raise DamagedFileError(f"{file}: {SIZE}{role} of step {step} is {value!r}, not a size; remove the line")
        if found:
            yield step, found
