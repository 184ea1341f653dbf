"""What tests of the engine share: a process group of one rank in the test's own process, and the plain loop.

The group is for what needs a real engine but no second rank; the loop is what every engine is held to.
"""

import functools
import json
import os
import select
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.checkpoint.commit import Pace, commit
from plumbline.launcher.runtime.checkpoint.snapshot import take_snapshot
from plumbline.launcher.runtime.checkpoint.store import TrainState
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.base import Engine
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.ranks.collectives import gather_objects
from plumbline.launcher.runtime.ranks.process_group import join, leave
from plumbline.launcher.runtime.ranks.world import World, read_world
from plumbline.launcher.runtime.run.inputs import Inputs, open_inputs
from plumbline.model.decoder import CausalLM
from plumbline.model.parameterization.initialization import initialize
from plumbline.model.parameterization.multipliers import multipliers
from plumbline.model.parameterization.rows import ParameterRow

if TYPE_CHECKING:
    from tests.conftest import Job, Run, Start


def set_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def save(engine: Engine, config: Config, state: TrainState, root: Path, world: World) -> Path:
    """Write a checkpoint in the foreground and return its folder; the run's folder is made if it is not there."""
    root.parent.mkdir(parents=True, exist_ok=True)
    return commit(take_snapshot(engine, state, locally=False), root, config.checkpoint, world, None, Pace())


def whole_weights(engine: Engine) -> dict[str, Tensor]:
    """Return copies of all fp32 weights by name, put together from the parts of all ranks. Collective."""
    mine = [piece.share(engine.world) for piece in engine.pieces()]
    parts = gather_objects([piece.of(piece.shard).float().clone() for piece in mine], engine.world)
    return {
        piece.name: torch.cat([share[number] for share in parts]).view(piece.shape) for number, piece in enumerate(mine)
    }


@pytest.fixture(scope="session")
def process_group() -> Iterator[tuple[World, dict[str, str]]]:
    """Yield the group and its environment variables, once for all tests: DeepSpeed keeps the first group for ever."""
    before = dict(os.environ)
    found = replace(read_world(), device=torch.device("cpu"))
    join(found, timeout_minutes=5.0)
    during = dict(os.environ)
    set_environment(before)
    yield found, during
    leave()


@pytest.fixture(scope="module")
def world(process_group: tuple[World, dict[str, str]]) -> Iterator[World]:
    """Yield the group, its environment variables in place for this module only: other tests start processes."""
    before, linear = dict(os.environ), F.linear
    set_environment(process_group[1])
    yield process_group[0]
    set_environment(before)
    F.linear = linear  # an engine at ZeRO stage 3 leaves DeepSpeed's in its place


@pytest.fixture(scope="module")
def inputs(config: Config, world: World) -> Inputs:
    """Open what the configuration of a module names, which is the module's own fixture."""
    return open_inputs(config, world)


@pytest.fixture(scope="module")
def engine(config: Config, world: World) -> DeepSpeedEngine:
    """Return an engine for the configuration of a module."""
    return DeepSpeedEngine(config, world)


def state_after(step: int, inputs: Inputs) -> TrainState:
    """Return where training stands after steps of 8 sequences of 32 tokens."""
    return TrainState(step, 8 * step, 256 * step, inputs.fingerprints)


Settings = Mapping[str, list[str]]
TrainMatrix = Callable[..., Callable[[str], "Run"]]


class Ranks:
    """Hold processes of train_matrix.py, one for each rank, which wait for what to train."""

    def __init__(self, job: "Job", folder: Path, ranks: int) -> None:
        self.job = job
        self._sockets = [socket.socket(socket.AF_UNIX) for _ in range(ranks)]
        for rank, connection in enumerate(self._sockets):
            job.wait_until((folder / str(rank)).exists)
            connection.connect(str(folder / str(rank)))

    def train(self, **request: Any) -> None:
        """Train one setting; a rank that fails fails the test."""
        for connection in self._sockets:
            connection.sendall(json.dumps(request).encode() + b"\n")
        waiting = list(self._sockets)

        def all_have_answered() -> bool:
            for ready in select.select(waiting, [], [], 0)[0]:
                if ready.recv(1024):
                    waiting.remove(ready)
            return not waiting  # a rank that has failed is at its end, which the job sees

        self.job.wait_until(all_have_answered)

    def close(self) -> None:
        """Let the processes end."""
        for connection in self._sockets:
            connection.close()
        self.job.wait()


@pytest.fixture(scope="module")
def train_matrix(start: "Start", tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainMatrix]:
    """Train each of many settings when a test first asks for it: (config, settings, ranks, groups) -> (name -> run).

    settings: name -> overrides. All of a module are trained by the same processes.
    groups: names of the settings in which to look at the optimizer's groups, in a second engine as well.
    """
    started: dict[tuple[Path, int], Ranks] = {}

    def ranks_for(config: Path, ranks: int) -> Ranks:
        if (config, ranks) not in started:
            folder = tmp_path_factory.mktemp("ranks")
            program = Path(__file__).with_name("train_matrix.py")
            started[config, ranks] = Ranks(start(program, [config, folder], folder, ranks=ranks), folder, ranks)
        return started[config, ranks]

    def make(config: Path, settings: Settings, ranks: int = 2, groups: Sequence[str] = ()) -> Callable[[str], "Run"]:
        @functools.cache
        def run(name: str) -> "Run":
            processes = ranks_for(config, ranks)
            processes.train(name=name, overrides=settings[name], groups=name in groups)
            return type(processes.job.run)(config.parent / "runs" / name)

        return run

    yield make
    for processes in started.values():
        processes.close()


@dataclass(frozen=True)
class Reference:
    """Hold what the plain loop computed."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]


def mean_cross_entropy(model: CausalLM, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["input_ids"])
    assert isinstance(logits, Tensor)
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


Optimizers = Callable[[dict[str, nn.Parameter], Sequence[ParameterRow]], list[torch.optim.Optimizer]]
Loss = Callable[[CausalLM, dict[str, Tensor]], Tensor]
PlainLoop = Callable[..., Reference]


@pytest.fixture(scope="session")
def plain_loop() -> PlainLoop:
    """Train in plain PyTorch, one process, one batch a step: (config, optimizers, loss) -> Reference.

    The optimizers' groups carry the lr_multiplier of their rows, and the loop sets lr.
    """

    def train(config: Config, make: Optimizers, loss_of: Loss = mean_cross_entropy) -> Reference:
        rows = plan_run(config).rows
        model = CausalLM(config.model, multipliers(config.model, config.parameterization))
        initialize(model, rows, config.run.seed)
        parameters = dict(model.named_parameters())
        optimizers = make(parameters, rows)
        batches = TrainBatches(config.data, config.run.seed)
        losses, grad_norms = [], []
        for step in range(plan_run(config).total_steps):
            micro_batches: list[Any] = batches.micro_batches(step)
            loss = loss_of(model, {key: torch.cat([batch[key] for batch in micro_batches]) for key in micro_batches[0]})
            model.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.grad_clip)
            lr = plan_run(config).lr_after(step * config.data.batch_plan.tokens_per_step)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr * group["lr_multiplier"]
                optimizer.step()
            losses.append(loss.item())
            grad_norms.append(norm.item())
        return Reference(losses, grad_norms, {name: p.detach() for name, p in parameters.items()})

    return train
