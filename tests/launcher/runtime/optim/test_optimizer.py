"""Which optimizer updates which tensor, with which values, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from plumbline.launcher.runtime.config.budget import checkpoint_bytes, totals
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.load import load_config, save_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.remarks import cautions
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.memory import model_states
from plumbline.launcher.runtime.optim.kind import OptimizerKind
from plumbline.launcher.runtime.optim.muon import ShardedMuon
from plumbline.launcher.runtime.optim.optimizer import (
    OPTIMIZERS,
    CombinedOptimizer,
    OptimizerConfig,
    divided,
    group_settings,
    make_optimizer,
    set_learning_rates,
    verify_settings,
)
from plumbline.model.decoder import CausalLM
from plumbline.model.parameterization.multipliers import multipliers

if TYPE_CHECKING:
    from tests.conftest import Command

VALUES: dict[str, Any] = {
    "run": {"name": "small"},
    # An embedding and a head with the shape of an attention projection: shapes tell nothing
    "model": {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    "parameterization": {"rule": "sp"},
    "data": {"train": [{"path": "nowhere"}], "sequence_length": 32, "global_batch_size": 8, "micro_batch_size": 2},
    "optimizer": {"lr": 1e-3},
    "train": {"steps": 10},
    "deepspeed": {"zero_stage": 0},
}
COMPLETEP = [
    "parameterization.rule=completep",
    "parameterization.base_hidden_size=16",
    "parameterization.base_num_hidden_layers=1",
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(VALUES))
    return path


def problem(path: Path, *overrides: str) -> str:
    """Return the one problem that loading or planning must find."""
    with pytest.raises(ConfigError) as caught:
        plan_run(load_config(path, list(overrides)))
    (line,) = str(caught.value).splitlines()[1:]
    return line.strip()


def settings_of(config: Config) -> dict[str, dict[str, Any]]:
    rows = plan_run(config).rows
    return group_settings(rows, config.optimizer, plan_run(config).settings.betas)


def build(config: Config) -> tuple[CausalLM, torch.optim.Optimizer]:
    model = CausalLM(config.model, multipliers(config.model, config.parameterization))
    return model, make_optimizer(model, settings_of(config), sharded=config.deepspeed.zero_stage > 0)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["optimizer.momentum=0.9"],
            "optimizer.momentum = 0.9: only name: muon uses it, and name is adamw; remove it",
        ),
        (["optimizer.name=soap", "optimizer.momentum=0.9"], "optimizer.momentum = 0.9: only name: muon uses it, and "),
        (["optimizer.name=muon", "optimizer.precondition_frequency=2"], "optimizer.precondition_frequency = 2: only "),
        (["optimizer.max_precondition_dim=64"], "optimizer.max_precondition_dim = 64: only name: soap uses it"),
        (["optimizer.name=muon", "optimizer.momentum=1.0"], "optimizer.momentum = 1.0: "),
        (
            ["optimizer.name=sgd"],
            f"optimizer.name = sgd: there is none of that name; it is one of {', '.join(OPTIMIZERS)}",
        ),
    ],
)
def test_keys_of_another_optimizer_are_refused(file: Path, overrides: list[str], line: str) -> None:
    assert problem(file, *overrides).startswith(line)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("adamw", (None, None, None)),
        ("muon", (0.95, None, None)),
        ("soap", (None, 10, 10_000)),
    ],
)
def test_defaults_are_filled_in_and_a_saved_configuration_loads(
    file: Path, tmp_path: Path, name: str, own: tuple[Any, ...]
) -> None:
    config = load_config(file, [f"optimizer.name={name}"])
    found = config.optimizer
    assert (found.momentum, found.precondition_frequency, found.max_precondition_dim) == own
    nulls = [f"optimizer.{key}=null" for key in ("momentum", "precondition_frequency", "max_precondition_dim")]
    assert load_config(file, [f"optimizer.name={name}", *nulls]) == config
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml", []) == config


def test_stages_that_cannot_work_are_refused(file: Path) -> None:
    for stage in (1, 2, 3):
        load_config(file, ["optimizer.name=muon", f"deepspeed.zero_stage={stage}"])
        line = problem(file, "optimizer.name=soap", f"deepspeed.zero_stage={stage}")
        assert line.startswith(f"deepspeed.zero_stage = {stage}: optimizer.name = soap ")
        assert "set deepspeed.zero_stage=0" in line
    line = problem(file, "optimizer.name=muon", "deepspeed.zero_stage=1", "deepspeed.offload_optimizer=true")
    assert line.startswith("deepspeed.offload_optimizer = true: optimizer.name = muon ")


def test_the_table_is_told_of_orthogonal_updates(file: Path) -> None:
    configs = {name: load_config(file, [f"optimizer.name={name}"]) for name in ("adamw", "muon", "soap")}
    found = {name: plan_run(config).settings for name, config in configs.items()}
    assert {name: settings.matrix_update for name, settings in found.items()} == {
        "adamw": "elementwise",
        "muon": "orthogonal",
        "soap": "elementwise",
    }


def test_the_limit_of_adamw_is_not_applied_to_others(file: Path) -> None:
    horizon = ["horizon.rule=complete_dp", "horizon.base_batch_tokens=256", "horizon.base_tokens=2560"]
    load_config(file, horizon)
    assert "optimizer.name is muon" in problem(file, *horizon, "optimizer.name=muon")


@pytest.mark.parametrize("name", ["muon", "soap"])
@pytest.mark.parametrize("rule", [[], COMPLETEP])
def test_hidden_matrices_and_nothing_else_change_the_optimizer(file: Path, name: str, rule: list[str]) -> None:
    """Under sp all matrices share every hyperparameter with the embedding, and still do not share its group."""
    config = load_config(file, [*rule, f"optimizer.name={name}", "model.attention_bias=true"])
    settings = settings_of(config)
    parameters = {p: group for group in settings.values() for p in group["parameters"]}
    model, _ = build(config)
    assert parameters.keys() == dict(model.named_parameters()).keys()
    matrices = {p for p in parameters if p.startswith("model.layers.") and p.endswith("_proj.weight")}
    assert len(matrices) == 14
    assert {p for p, group in parameters.items() if group["algorithm"] == name} == matrices
    assert {group["algorithm"] for p, group in parameters.items() if p not in matrices} == {"adamw"}
    rows = plan_run(config).rows
    for row in rows:
        group = parameters[row.name]
        assert (group["lr"], group["lr_multiplier"], group["weight_decay"]) == (
            row.lr,
            row.lr_multiplier,
            row.weight_decay,
        )


def test_the_groups_of_adamw_are_as_ever(file: Path) -> None:
    config = load_config(file, COMPLETEP)
    _, optimizer = build(config)
    assert type(optimizer) is torch.optim.AdamW
    assert all(group["fused"] for group in optimizer.param_groups)
    names = ["embedding+unembedding", "hidden_norm", "hidden_matrix", "qk_norm", "final_norm"]
    assert [group["name"] for group in optimizer.param_groups] == list(settings_of(config)) == names


def test_matrices_that_scale_differently_are_groups_apart(file: Path) -> None:
    """Their names say the role and a number, so that none is lost and each is found again."""
    own = "parameterization.lr_multipliers={'.*down_proj.weight': 0.5, unembedding: 2.0}"
    config = load_config(file, [own, *COMPLETEP, "parameterization.base_intermediate_size=64"])
    settings = settings_of(config)
    rows = plan_run(config).rows
    held = {name: group for group in settings.values() for name in group["parameters"]}
    assert len([name for group in settings.values() for name in group["parameters"]]) == len(rows)
    for row in rows:
        assert (held[row.name]["lr_multiplier"], held[row.name]["eps"]) == (row.lr_multiplier, row.eps)
    assert {"hidden_matrix", "hidden_matrix#2", "hidden_matrix#3"} <= settings.keys()


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_one_optimizer_shows_all_groups_in_order(file: Path, name: str) -> None:
    config = load_config(file, [*COMPLETEP, f"optimizer.name={name}"])
    model, optimizer = build(config)
    settings = settings_of(config)
    verify_settings(optimizer.param_groups, settings)
    set_learning_rates(optimizer.param_groups, 0.5)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5 * s["lr_multiplier"] for s in settings.values()]
    ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("muon", "momentum", 0.5),
        ("muon", "algorithm", "adamw"),
        ("soap", "precondition_frequency", 11),
        ("soap", "eps", 1e-3),
    ],
)
def test_changed_settings_are_noticed(file: Path, name: str, key: str, value: Any) -> None:
    config = load_config(file, [*COMPLETEP, f"optimizer.name={name}"])
    _, optimizer = build(config)
    settings, groups = settings_of(config), optimizer.param_groups
    (group,) = (group for group in groups if group["name"] == "hidden_matrix")
    group[key] = value
    with pytest.raises(RuntimeError, match=f"group hidden_matrix: {key} is {value}"):
        verify_settings(groups, settings)


def step_once(config: Config, steps: int = 1) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return weights before and after some steps on random gradients, at the peak learning rates."""
    torch.manual_seed(0)
    model, optimizer = build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return before, {name: p.detach() for name, p in model.named_parameters()}


def test_muon_at_the_base_has_the_step_size_of_adamw(file: Path) -> None:
    config = load_config(file, ["optimizer.name=muon", "optimizer.weight_decay=0.5", "optimizer.lr=0.01"])
    before, after = step_once(config)
    adamw_before, adamw_after = step_once(load_config(file, ["optimizer.weight_decay=0.5", "optimizer.lr=0.01"]))
    for name in before:
        assert torch.equal(before[name], adamw_before[name])
        change = after[name] - before[name]
        if name.endswith("_proj.weight"):
            step = (change + 0.01 * 0.5 * before[name]) / 0.01  # decay is coupled: lr x weight_decay
            assert step.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.2), name
        else:
            assert torch.equal(after[name], adamw_after[name]), f"{name} is AdamW's"


def test_a_state_that_is_saved_and_loaded_goes_on_to_the_last_bit(file: Path) -> None:
    for name in ("muon", "soap"):
        config = load_config(
            file, [f"optimizer.name={name}", *(["optimizer.precondition_frequency=2"] * (name == "soap"))]
        )
        torch.manual_seed(0)
        model, optimizer = build(config)
        for parameter in model.parameters():  # until here they are whatever was in memory
            torch.nn.init.normal_(parameter)
        gradients = [[torch.randn_like(p) for p in model.parameters()] for _ in range(7)]

        def advance(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, g: Any = gradients) -> None:
            for step in steps:
                for parameter, gradient in zip(model.parameters(), g[step], strict=True):
                    parameter.grad = gradient.clone()
                optimizer.step()

        advance(model, optimizer, range(3))
        resumed, other = build(config)
        resumed.load_state_dict(model.state_dict())
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        advance(model, optimizer, range(3, 7))
        advance(resumed, other, range(3, 7))
        for (parameter_name, p), q in zip(model.named_parameters(), resumed.parameters(), strict=True):
            assert torch.equal(p, q), f"{name}: {parameter_name}"


def test_sharded_stages_get_the_sharded_muon(file: Path) -> None:
    for stage, expected in ((0, torch.optim.Muon), (1, ShardedMuon), (3, ShardedMuon)):
        _, optimizer = build(load_config(file, ["optimizer.name=muon", f"deepspeed.zero_stage={stage}"]))
        assert isinstance(optimizer, CombinedOptimizer)
        assert type(optimizer.parts["muon"]) is expected


def test_memory_counts_what_each_optimizer_keeps(file: Path) -> None:
    """Per hidden matrix of m x n: Muon one moment; SOAP two and two square matrices for each preconditioned side."""
    model = ["model.intermediate_size=96", "model.vocab_size=100"]
    config = load_config(file, model)
    rows = plan_run(config).rows
    shapes = [row.shape for row in rows if row.role == "hidden_matrix"]
    assert sorted(set(shapes)) == [(64, 64), (64, 96), (96, 64)]
    count, hidden = sum(row.count for row in rows), sum(m * n for m, n in shapes)
    squares = sum(m * m + n * n for m, n in shapes)
    short = sum(size**2 for shape in shapes for size in shape if size == 64)

    def optimizer_bytes(stage: int, *overrides: str) -> float:
        return model_states(
            load_config(file, [*model, *overrides]), totals(rows), stage, ranks=4, activations=0
        ).optimizer

    assert optimizer_bytes(0, "optimizer.name=muon") == 8 * (count - hidden) + 4 * hidden
    assert optimizer_bytes(1, "optimizer.name=muon", "deepspeed.zero_stage=1") == (12 * count - 4 * hidden) / 4
    assert optimizer_bytes(0, "optimizer.name=soap") == 8 * count + 8 * squares
    assert optimizer_bytes(0, "optimizer.name=soap", "optimizer.max_precondition_dim=64") == 8 * count + 8 * short
    blocks = sum(m * n / (32 * 32) * 2 * 32**2 for m, n in shapes)
    assert optimizer_bytes(0, "optimizer.name=soap", "optimizer.precondition_block=40") == 8 * count + 8 * blocks


@pytest.mark.parametrize("name", ["adamw", "muon", "soap"])
@pytest.mark.parametrize("frozen", ["false", "true"])
def test_memory_counts_what_an_optimizer_holds(file: Path, name: str, frozen: str) -> None:
    """And a checkpoint has the same, beside the weights: nothing for frozen ones."""
    config = load_config(file, [f"optimizer.name={name}", f"model.frozen_mlp={frozen}", f"model.frozen_qk={frozen}"])
    rows = plan_run(config).rows
    _, optimizer = build(config)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    kept = sum(t.nbytes for state in optimizer.state.values() for key, t in state.items() if key != "step")
    assert kept == model_states(config, totals(rows), 0, ranks=4, activations=0).optimizer
    assert kept == checkpoint_bytes(config, rows) - 4 * totals(rows).total


def test_soap_is_warned_of_bases_that_grow_with_the_width(file: Path) -> None:
    wide = ["optimizer.name=soap", "parameterization.rule=completep", "parameterization.base_hidden_size=32"]
    wide += ["parameterization.base_num_hidden_layers=2", "model.hidden_size=64"]

    def warned(*overrides: str) -> bool:
        config = load_config(file, [*wide, *overrides])
        return any("set optimizer.precondition_block=32" in text for text in cautions(config, plan_run(config)))

    assert warned()
    assert not warned("optimizer.precondition_block=32")
    assert not warned("parameterization.base_hidden_size=64")
    assert not warned("parameterization.rule=sp")
    assert not warned("optimizer.name=adamw")


@pytest.mark.parametrize(
    ("size", "block", "length"),
    [(683, 32, 1), (122, 32, 2), (683, 1000, None), (672, 32, None), (88, 32, None)],
)
def test_soap_is_warned_of_a_side_that_cannot_be_cut(file: Path, size: int, block: int, length: int | None) -> None:
    """683 is prime and 122 twice a prime; 88 has blocks of 22."""
    keys = ["optimizer.name=soap", f"optimizer.precondition_block={block}", f"model.intermediate_size={size}"]
    config = load_config(file, keys)
    found = [text for text in cautions(config, plan_run(config)) if "precondition_block" in text]
    assert len(found) == (0 if length is None else 1)
    assert all(f"the side of {size} of model.layers." in text for text in found)
    assert all(f"blocks of {length}, " in text and f"divides {size}" in text for text in found)


def test_plan_shows_only_stages_that_work(command: Command, tiny_config: Path) -> None:
    for overrides, stages in (([], {"0", "1", "2", "3"}), (["optimizer.name=soap", "deepspeed.zero_stage=0"], {"0"})):
        done = command("plan", "--config", tiny_config, "--json", *overrides)
        assert done.returncode == 0, done.stderr
        assert set(json.loads(done.stdout)["memory_bytes"]) == stages


def test_a_new_optimizer_is_not_given_flat_shards_unless_it_says_that_it_may() -> None:
    assert OptimizerKind("mine", lambda groups, _: torch.optim.SGD(groups)).zero_stages == (0,)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_keys_that_an_optimizer_calls_its_own_are_in_the_section(name: str) -> None:
    missing = OPTIMIZERS[name].own_keys.keys() - OptimizerConfig.model_fields.keys()
    assert not missing, "add a class with these keys to the bases of OptimizerConfig"


def test_groups_are_divided_from_their_ends() -> None:
    """The backward pass begins there, so the remainder is what it completes last."""
    counts = {"a": 3, "b": 4, "c": 4, "d": 9, "e": 1, "norm": 1}
    settings = {
        "hidden": {"lr": 1, "parameters": ["a", "b", "c", "d", "e"]},
        "norms": {"lr": 2, "parameters": ["norm"]},
    }
    found = divided(settings, counts, 8)
    assert {name: group["parameters"] for name, group in found.items()} == {
        "hidden/1": ["a"],
        "hidden/2": ["b", "c"],
        "hidden/3": ["d", "e"],
        "norms": ["norm"],
    }
    assert [group["lr"] for group in found.values()] == [1, 1, 1, 2]
    assert divided(settings, counts, 100) == settings
    assert settings["hidden"]["parameters"] == ["a", "b", "c", "d", "e"]
