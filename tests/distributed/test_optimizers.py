"""Muon and SOAP through the engine are torch.optim.Muon and SOAP in a plain loop, at every stage that is offered.

The model is that of test_zero_parity.py. On one rank without sharding there is no other order of summation, and the
weights agree to the last bit. Elsewhere that bit grows faster than under AdamW: Muon's update is computed in bf16, so
it becomes a rounding of 2^-9 here and there, and SOAP's first bases are eigenvectors of nearly singular matrices.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.optim.soap import SOAP
from plumbline.model.objectives.next_token import NextToken, NextTokenConfig
from plumbline.model.parameterization.rows import ParameterRow
from tests.distributed.conftest import whole_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from plumbline.launcher.runtime.ranks.world import World
    from tests.conftest import Pretrain, Run, Start
    from tests.distributed.conftest import Optimizers, PlainLoop, Reference, TrainMatrix

NAMES = ("muon", "soap")
STEPS = ["train.steps=12", "checkpoint.interval=6", "train.eval_interval=12"]
OWN: dict[
    str, dict[str, Any]
] = {  # SOAP refreshes its bases before and after the middle checkpoint; one side of the MLP's matrices has none
    "muon": {"momentum": 0.9},
    "soap": {"precondition_frequency": 4, "precondition_block": 10_000, "max_precondition_dim": 64},
}
CHOICE = {
    name: [*STEPS, f"optimizer.name={name}", *(f"optimizer.{key}={value}" for key, value in OWN[name].items())]
    for name in NAMES
}
OFFERED = ["muon_fp32_0", "muon_fp32_1", "muon_fp32_2", "muon_fp32_3", "soap_fp32_0"]
ROUNDED = ["muon_bf16_1", "muon_bf16_2", "muon_bf16_3", "soap_bf16_0"]
GROUPED = ["muon_fp32_1", "muon_fp32_3", "muon_bf16_1", "soap_fp32_0"]
SETTINGS = {
    name: [*CHOICE[name[:4]], f"deepspeed.precision={name[5:9]}", f"deepspeed.zero_stage={name[-1]}"]
    for name in [*OFFERED, *ROUNDED]
}
CHANGED = ["optimizer.lr=0.002", "optimizer.weight_decay=0.3", "optimizer.eps=1.0e-6", "optimizer.betas=[0.8, 0.9]"]


@pytest.fixture(scope="module")
def runs(train_matrix: TrainMatrix, tiny_config: Path) -> Callable[[str], Run]:
    """Return the finished runs of all settings, by two ranks."""
    return train_matrix(tiny_config, SETTINGS, groups=GROUPED)


def by_hand(config: Config) -> Optimizers:
    """Return the optimizers as a user of PyTorch would make them, one group for each tensor of the table."""
    name, betas = config.optimizer.name, (config.optimizer.betas[0], config.optimizer.betas[1])

    def make(parameters: dict[str, nn.Parameter], rows: Sequence[ParameterRow]) -> list[torch.optim.Optimizer]:
        def groups(hidden: bool, adam: bool) -> list[dict[str, Any]]:
            return [
                {"params": [parameters[row.name]], "lr_multiplier": row.lr_multiplier, "lr": row.lr}
                | {"weight_decay": row.weight_decay, **({"betas": betas, "eps": row.eps} if adam else {})}
                for row in rows
                if ("_proj." in row.name) == hidden
            ]

        assert (len(groups(True, True)), len(groups(False, True))) == (14, 11)
        others = torch.optim.AdamW(groups(False, True), fused=True)
        if name == "muon":
            return [others, torch.optim.Muon(groups(True, False), momentum=0.9, adjust_lr_fn="match_rms_adamw")]
        return [others, SOAP([group | OWN["soap"] for group in groups(True, True)])]

    return make


@pytest.fixture(scope="module")
def references(tiny_config: Path, plain_loop: PlainLoop) -> dict[str, Reference]:
    """Run the same training in plain PyTorch: one process, one batch a step."""
    configs = {name: load_config(tiny_config, [*CHOICE[name], "deepspeed.zero_stage=0"]) for name in NAMES}
    return {name: plain_loop(config, by_hand(config)) for name, config in configs.items()}


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_equals_the_plain_loop_to_the_last_bit(
    tiny_config: Path, world: World, plain_loop: PlainLoop, name: str
) -> None:
    config = load_config(tiny_config, [*CHOICE[name], "deepspeed.zero_stage=0", "data.micro_batch_size=8"])

    def loss(model: Any, batch: Any) -> Any:
        assert isinstance(config.objective, NextTokenConfig)
        return NextToken(config.objective)(model, batch, 0)[0].sum() * (1 / (batch["labels"] >= 0).sum().float())

    reference = plain_loop(config, by_hand(config), loss)
    engine, batches = DeepSpeedEngine(config, world), TrainBatches(config.data, config.run.seed)
    norms = []
    for step in range(plan_run(config).total_steps):
        lr = plan_run(config).lr_after(step * config.data.batch_plan.tokens_per_step)
        norms.append(engine.train_step(batches.micro_batches(step), step, lr).result.grad_norm)
    assert norms == reference.grad_norms
    different = [n for n, weight in whole_weights(engine).items() if not torch.equal(weight, reference.weights[n])]
    assert different == []


def test_the_comparison_can_fail(references: dict[str, Reference], tiny_config: Path) -> None:
    muon, soap = references["muon"], references["soap"]
    clip = load_config(tiny_config, []).optimizer.grad_clip
    assert min(muon.grad_norms) > clip, "the clip binds at every step"
    assert min(soap.grad_norms) > clip
    assert muon.losses[-1] < muon.losses[0] - 0.5, "training moves"
    assert abs(muon.losses[-1] / soap.losses[-1] - 1) > 0.005, "and each optimizer in its own way"


@pytest.mark.parametrize("name", OFFERED)
def test_two_ranks_equal_the_plain_loop(
    runs: Callable[[str], Run], references: dict[str, Reference], name: str
) -> None:
    """Reported gradient norms are those before the clip, so they tell of clipping as well."""
    run, reference = runs(name), references[name[:4]]
    losses, norms = (list(run.column(key).values()) for key in ("loss", "grad_norm"))
    assert losses[:2] == pytest.approx(reference.losses[:2], rel=1e-6)
    assert norms[:2] == pytest.approx(reference.grad_norms[:2], rel=1e-5)
    for_losses, for_norms = (1e-4, 2e-3) if "muon" in name else (2e-3, 2e-2)
    assert losses == pytest.approx(reference.losses, rel=for_losses)
    assert norms == pytest.approx(reference.grad_norms, rel=for_norms)


@pytest.mark.parametrize("name", ROUNDED)
def test_bf16_stays_within_its_precision_of_fp32(runs: Callable[[str], Run], name: str) -> None:
    exact, losses = (list(runs(n).column("loss").values()) for n in (f"{name[:4]}_fp32_0", name))
    assert losses == pytest.approx(exact, rel=0.005)
    assert losses != exact
    norms = [list(runs(n).column("grad_norm").values()) for n in (f"{name[:4]}_fp32_0", name)]
    assert norms[1] == pytest.approx(norms[0], rel=0.05)


@pytest.mark.parametrize("name", GROUPED)
def test_running_groups_are_those_of_the_table(runs: Callable[[str], Run], tiny_config: Path, name: str) -> None:
    """Before training, after it, and after loading a checkpoint under other hyperparameters, which then win."""
    groups = json.loads((runs(name).folder / "groups.json").read_text())
    for moment, overrides in (("before", []), ("after", []), ("changed", CHANGED)):
        config = load_config(tiny_config, [*SETTINGS[name], *overrides])
        by_role = {role: group for group in groups[moment] for role in group["name"].split("+")}
        for row in plan_run(config).rows:
            group, hidden = by_role[row.role], row.role == "hidden_matrix"
            expected: dict[str, Any] = {"lr_multiplier": row.lr_multiplier, "weight_decay": row.weight_decay}
            expected["algorithm"] = config.optimizer.name if hidden else "adamw"
            if not (hidden and config.optimizer.name == "muon"):
                expected |= {"eps": row.eps, "betas": config.optimizer.betas}
            expected |= OWN[config.optimizer.name] if hidden else {}
            assert {key: group[key] for key in expected} == expected, f"{moment}: {row.name}"
        if moment == "after":
            lr = config.optimizer.lr * plan_run(config).schedule.factor(11 * config.data.batch_plan.tokens_per_step)
            assert all(group["lr"] == lr * group["lr_multiplier"] for group in groups[moment])


@pytest.mark.parametrize("name", ["muon_bf16_1", "muon_fp32_3", "soap_bf16_0"])
def test_resumed_equals_uninterrupted(
    runs: Callable[[str], Run], run_pretrain: Pretrain, tiny_config: Path, name: str
) -> None:
    """From the checkpoint in the middle of the finished run, by launcher/pretrain.py, to the last bit."""
    whole = runs(name)
    folder = whole.folder.with_name(f"resumed_{name}")
    shutil.copytree(whole.folder, folder)
    shutil.rmtree(folder / "checkpoints" / "step_00000012")
    (folder / "result.json").unlink()
    outcome = run_pretrain(tiny_config, folder.name, SETTINGS[name], ranks=2)
    assert outcome.code == 0, outcome.stderr
    assert "resuming after step 6 from" in outcome.stdout
    for key in ("loss", "grad_norm", "eval/email/loss"):
        assert outcome.run.column(key) == whole.column(key)
    weights = outcome.run.weights(12)
    assert [n for n, weight in whole.weights(12).items() if not torch.equal(weight, weights[n])] == []


def test_another_optimizer_does_not_resume(
    runs: Callable[[str], Run], run_pretrain: Pretrain, tiny_config: Path
) -> None:
    folder = runs("soap_fp32_0").folder
    overrides = [*STEPS, "deepspeed.zero_stage=0", "train.steps=13"]
    outcome = run_pretrain(tiny_config, folder.name, overrides, launcher="python")
    assert outcome.code == 2, outcome.stdout
    assert "optimizer.name: 'soap' -> 'adamw'" in outcome.stderr
    assert "optimizer.max_precondition_dim: 64 -> None" in outcome.stderr


def test_three_ranks_step_as_torch_does_on_whole_matrices(start: Start, tmp_path: Path) -> None:
    """With the same gradients there is nothing left to differ but the last bit, whatever pieces a rank holds."""
    worker = Path(__file__).with_name("step_muon.py")
    outcome = start(worker, [tmp_path / "found.json"], tmp_path, ranks=3).wait()
    assert outcome.code == 0, outcome.stderr
    for layout, found in json.loads((tmp_path / "found.json").read_text()).items():
        assert found["difference"] < 2e-7, layout
        assert found["change"] > 0.05
        assert sum(found["owned"]) == 6
        assert min(found["owned"]) > 0, "the ranks share the work"
