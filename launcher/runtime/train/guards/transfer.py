"""Record the size of updates for each role of tensor, and warn if it differs from the base run.

Hyperparameters transfer from a small model as long as the tensors of each role are updated as their row of the
parameterization's table says. So the size of an update is measured relative to the one that the optimizer's state
implies (`OptimizerKind.unit_update`):

    size(role) = rms((W' - W + lr decay W) / lr) / rms(unit)       lr, decay: of the row, at this step

For AdamW, unit = m / sqrt(v) with the bias corrections of this step. So the size is 1 at any width, depth, data and
step if eps is small compared with sqrt(v). A size below 1 shows how much eps reduces the update, and that is the same
for models of all sizes if eps follows the table. The size changes if a learning rate never reached the optimizer, if
eps does not scale, or if several groups share a count of Adam's steps. It does not depend on what the gradients are.

Only updates 1, 2, 4, 8, ... are measured: they show mistakes that exist from the start, and other updates cost nothing.
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
from plumbline.launcher.runtime.config.run_files import METRICS
from plumbline.launcher.runtime.engine.base import Engine
from plumbline.launcher.runtime.engine.pieces import Piece, sampled, stands_for
from plumbline.launcher.runtime.engine.step_result import StepResult
from plumbline.launcher.runtime.optim.optimizer import OPTIMIZERS
from plumbline.launcher.runtime.ranks.collectives import from_main, sum_over_ranks
from plumbline.launcher.runtime.run.metrics import read_metrics
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.train.guards.guard import Guard

SIZE = "step_size/"  # size of a role's update, in metrics.jsonl
RATIO = "transfer/"  # ratio of a role's size to that in the base run
DIGITS = 6  # significant ones in a record

Sizes = Mapping[int, Mapping[str, float]]
"""Step -> role -> size of its update."""


class Transfer(Guard):
    """Measure the sizes of updates by role, and compare them with the base run. All ranks create one together.

    During an update that is measured, copies of parts of this rank's weights are kept (`pieces.sampled`).

    Args:
        engine: the engine that trains.
        settings: the base run, and how far a size may be from that of the base.

    Raises:
        ConfigError: the base run logged no sizes.
    """

    name = "transfer"

    def __init__(self, engine: Engine, settings: TransferConfig) -> None:
        self._engine, self._factor = engine, settings.factor
        self._base = from_main(partial(read_base, settings), engine.world)  # one rank reads the long log
        groups = {name: group for group in engine.settings.values() for name in group["parameters"]}
        self._rows = {
            row.name: (row, groups[row.name], unit_update)
            for row in engine.plan.rows
            if row.trainable and (unit_update := OPTIMIZERS[groups[row.name]["algorithm"]].unit_update) is not None
        }
        self._roles = sorted({row.role for row, *_ in self._rows.values()})
        self._step, self._lr, self._skipped = 0, 0.0, 0
        self._before: dict[str, Tensor] = {}
        self._sums: dict[int, Tensor] = {}  # sums of steps that were measured but not read yet
        self._outside: set[str] = set()

    def before_step(self, step: int, _micro_batches: int) -> None:
        """Record the next step and its base learning rate by the schedule."""
        plan = self._engine.plan
        self._step, self._lr = step, plan.lr_after(plan.batch_plan.tokens_before(step - 1))

    @torch.no_grad()
    def before_update(self) -> None:
        """Copy the weights that are compared, if this update is measured."""
        if self._lr and self._step & (self._step - 1) == 0:
            for name, weight in self._engine.master_pieces():
                if name in self._rows:
                    self._before[name] = sampled(weight, self._width(name)).clone()

    @torch.no_grad()
    def after_update(self) -> None:
        """Sum the squares of the updates and of the unit updates, by role. Collective, if this update is measured."""
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
        if not (of_shard and lr):  # no update was applied yet, or the rate is 0
            return before.new_zeros(2, dtype=torch.float64)
        weight, width = piece.of(piece.shard), self._width(piece.name)
        update = (sampled(weight, width) - before * (1 - lr * row.weight_decay)) / lr
        of_piece = {key: sampled(piece.of(value), width) for key, value in of_shard.items()}
        unit = unit_update(of_piece, group, self._step - self._skipped)
        sums = torch.stack([values.square().sum(dtype=torch.float64) for values in (update, unit)])
        return sums * stands_for(before, weight)

    def _width(self, name: str) -> int:
        shape = self._rows[name][0].shape
        return shape[-1] if shape else 1

    def after_step(self, _step: int, result: StepResult) -> None:
        """Count skipped updates, which Adam does not count as steps, and drop their measurements.

        A step that was measured before this result was read assumed one step too many, so it is dropped as well.
        """
        if not result.applied:
            self._skipped += 1
            self._sums.clear()

    def found(self, step: int) -> dict[str, float]:
        """Return the sizes by role, and their ratios to those of the base run; warn of roles that leave their band."""
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
        """Warn of roles whose ratio left the allowed band; again only after it has been back inside."""
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
        """Return the number of skipped updates, and the roles that are outside of their band."""
        return {"skipped": self._skipped, "outside": sorted(self._outside)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the number of skipped updates, and the roles that were already warned of."""
        self._skipped, self._outside = int(state.get("skipped", 0)), set(map(str, state.get("outside", ())))


def _is_like(value: Any, shard: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == shard.shape


def read_base(settings: TransferConfig, most: int | None = None) -> Sizes:
    """Return the sizes of updates that the base run logged, or none without a base.

    Args:
        settings: the settings with the base.
        most: maximum number of steps whose sizes are read, from the first one on; None reads the whole log.

    Raises:
        ConfigError: the base is not a run, or logged no sizes.
        DamagedFileError: a line of its log is damaged.
    """
    if settings.base is None:
        return {}
    file = Path(settings.base) / METRICS
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
    """Yield each step whose update was measured, and role -> size."""
    for step, record in read_metrics(file):
        found = {key.removeprefix(SIZE): value for key, value in record.items() if key.startswith(SIZE)}
        for role, value in found.items():
            if not isinstance(value, int | float) or value <= 0:
                raise DamagedFileError(f"{file}: {SIZE}{role} of step {step} is {value!r}, not a size; remove the line")
        if found:
            yield step, found
