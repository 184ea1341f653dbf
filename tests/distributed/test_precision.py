"""Rounding while training: every ZeRO stage, world size, block and objective; resumes; branches into another precision.

Rounding is a step function. Another order of summation first changes nothing, then moves a value over the edge of a
step, and training amplifies that: so curves agree tightly at first and loosely later.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.checkpoint.resume import check_resume
from plumbline.launcher.runtime.checkpoint.store import CheckpointError
from plumbline.launcher.runtime.checkpoint.tensors import shard_name
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.models.open import load_model
from plumbline.launcher.runtime.run.inputs import open_inputs
from plumbline.model.quantization import float8
from plumbline.model.quantization.precision import apply_precision
from tests.distributed.conftest import whole_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from plumbline.launcher.runtime.config.schema import Config
    from plumbline.launcher.runtime.ranks.world import World
    from tests.conftest import Pretrain, Run
    from tests.distributed.conftest import TrainMatrix

BY_TOKEN = [
    "precision.weights=4",
    "precision.activations={format: int8, granularity: token}",
    "precision.kv_cache={format: int6, granularity: token}",
]
PAPERS = ["precision.weights=4", "precision.activations=8", "precision.kv_cache=6"]
SHORT = ["train.steps=4", "train.eval_interval=null", "train.eval_batches=1"]
LOOKAHEAD = ["objective.name=latent_lookahead", "objective.horizon=3", "objective.anchors=4"]
# Dropout and bf16 so that a resume has random numbers and master weights to get wrong
RESUMED = [*SHORT, *PAPERS, "deepspeed.zero_stage=3", "deepspeed.precision=bf16", "model.dropout=0.1"]
RESUMED += ["checkpoint.interval=2", "checkpoint.keep_last=9", "metrics.diagnostics_interval=3"]
PARENT = [*SHORT, "train.steps=5", "checkpoint.interval=4", "checkpoint.keep_last=9"]  # its rate decays from step 4
SETTINGS = {
    **{f"stage_{stage}": [*SHORT, *BY_TOKEN, f"deepspeed.zero_stage={stage}"] for stage in range(4)},
    "checkpointed": [*SHORT, *BY_TOKEN, "deepspeed.zero_stage=3", "train.activation_checkpointing=full"],
    "micro_batch": [*SHORT, *BY_TOKEN, "data.micro_batch_size=4"],
    **{f"look_{stage}": [*SHORT, *BY_TOKEN, *LOOKAHEAD, f"deepspeed.zero_stage={stage}"] for stage in (1, 3)},
    "whole": RESUMED,
    "parent": PARENT,
}


@pytest.fixture(scope="module")
def runs(train_matrix: TrainMatrix, tiny_config: Path) -> Callable[[str], Run]:
    """Return the finished runs of all settings, by two ranks."""
    found = train_matrix(tiny_config, {f"rounded_{name}": overrides for name, overrides in SETTINGS.items()})
    return lambda name: found(f"rounded_{name}")


def assert_together(found: dict[int, float], expected: dict[int, float]) -> None:
    """Compare to the last bits while no value was moved over the edge of a step, closely for some steps more."""
    assert list(found) == list(expected) == [1, 2, 3, 4]
    assert list(found.values())[:2] == pytest.approx(list(expected.values())[:2], rel=2e-6)
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("stage_1", "stage_0"),
        ("stage_2", "stage_0"),
        ("stage_3", "stage_0"),
        ("checkpointed", "stage_3"),
        ("micro_batch", "stage_1"),
        ("look_3", "look_1"),
    ],
)
def test_stages_checkpointing_and_micro_batches_agree(runs: Callable[[str], Run], name: str, other: str) -> None:
    """With scales for each token: what else is in the micro-batch does not matter."""
    for key in ("loss", "grad_norm"):
        assert_together(runs(name).column(key), runs(other).column(key))


ONE_MICRO_BATCH = ["data.global_batch_size=2"]


def two_steps(config: Config, world: World) -> list[float]:
    """Loss and gradient norm of the first steps of a run by one rank."""
    engine, batches = DeepSpeedEngine(config, world), TrainBatches(config.data, config.run.seed)
    made = [engine.train_step(batches.micro_batches(step), step, 1e-3).result for step in range(2)]
    return [value for step in made for value in (step.loss.item(), step.grad_norm)]


def test_one_rank_trains_as_two_do(runs: Callable[[str], Run], tiny_config: Path, world: World) -> None:
    config = load_config(tiny_config, SETTINGS["stage_1"])
    engine, batches = DeepSpeedEngine(config, world), TrainBatches(config.data, config.run.seed)
    rates, expected = (runs("stage_1").column(key) for key in ("lr", "loss"))
    for step in range(2):
        result = engine.train_step(batches.micro_batches(step), step, rates[step + 1]).result
        assert result.loss.item() == pytest.approx(expected[step + 1], rel=2e-6)


BLOCKS: dict[str, list[str]] = {
    "shaped": ["model.family=shaped"],
    "skipless": ["model.family=sas", "model.num_key_value_heads=2"],
    # Small at its start, such a model is its embedding; branches that weigh something show what is rounded in them
    "norm_free": ["model.family=outlier_protected", "model.initializer_range=0.2"],
    "sandwich": ["model.block=sandwich_norm", "model.value_residual=true", "model.attention_gate=elementwise"],
    "post_norm": ["model.family=fog", "model.attention_bias=true"],
    "mixing": ["model.family=mixit"],
    "pruned": ["model.attention=pruned", "model.pruning_rank=8"],
    "frozen": ["model.frozen_qk=true", "model.parallel=true", "model.attention_sink=true"],
}
NO_STORE = {name: ["precision.kv_cache=null"] for name in ("mixing", "pruned")}


@pytest.mark.parametrize("name", list(BLOCKS))
def test_every_block_rounds_alike_when_it_is_sharded(tiny_config: Path, world: World, name: str) -> None:
    """The second step sees what the gradients of the first, through the rounding, have made of the weights."""
    plain, whole, sharded = (
        two_steps(load_config(tiny_config, [*ONE_MICRO_BATCH, *BLOCKS[name], *rounded]), world)
        for rounded in (
            [],
            [*PAPERS, *NO_STORE.get(name, [])],
            [*PAPERS, *NO_STORE.get(name, []), "deepspeed.zero_stage=3"],
        )
    )
    assert sharded[:2] == pytest.approx(whole[:2], rel=2e-6)
    assert sharded[2:] == pytest.approx(whole[2:], rel=1e-3)
    assert max(abs(one - other) for one, other in zip(plain, whole, strict=True)) > 1e-6, "something is rounded"


def test_a_resumed_run_equals_an_uninterrupted_one(
    runs: Callable[[str], Run], run_pretrain: Pretrain, tiny_config: Path
) -> None:
    """To the last bit, with the scales of whole tensors, and diagnostics in between."""
    whole = runs("whole")
    half = whole.folder.with_name("rounded_half")
    shutil.copytree(whole.folder, half)
    shutil.rmtree(half / "checkpoints" / "step_00000004")
    (half / "result.json").unlink()
    outcome = run_pretrain(tiny_config, "rounded_half", RESUMED, ranks=2)
    assert outcome.code == 0, outcome.stderr
    assert "rounded  weights int4 (channel), activations int8 (tensor), kv_cache int6 (tensor)" in outcome.stdout
    assert "resuming after step 2" in outcome.stdout
    assert outcome.run.numbers == whole.numbers
    for rank in (0, 1):
        file = f"checkpoints/step_00000004/{shard_name(rank)}"
        assert (outcome.run.folder / file).read_bytes() == (whole.folder / file).read_bytes()


@pytest.mark.parametrize("change", ["precision.weights=3", "precision.kv_cache=null"])
def test_a_resume_in_another_precision_is_refused(
    runs: Callable[[str], Run], tiny_config: Path, world: World, change: str
) -> None:
    found = runs("whole").folder / "checkpoints" / "step_00000002"
    old, new = load_config(found / "config.yaml", []), load_config(tiny_config, [*RESUMED, change])
    with pytest.raises(CheckpointError, match=rf"\n  {change.partition('=')[0]}[.:\w]* .* -> "):
        check_resume(old, new, open_inputs(old, world).fingerprints, found)


def test_a_branch_may_round_what_its_parent_did_not(
    runs: Callable[[str], Run], run_pretrain: Pretrain, tiny_config: Path
) -> None:
    """Quantization-aware training from a checkpoint: it starts as the parent's model at the branch's precision."""
    parent = runs("parent").folder / "checkpoints" / "step_00000004"
    typed = [*PARENT, *BY_TOKEN, f"schedule.branch.checkpoint={parent}", "schedule.branch.steps=2"]
    outcome = run_pretrain(tiny_config, "rounded_branch", typed, ranks=2)
    assert outcome.code == 0, outcome.stderr
    losses = outcome.run.column("loss")
    assert list(losses) == [5, 6]

    config, opened = load_config(tiny_config, typed[:-2]), load_model(parent, torch.device("cpu"))
    batches = TrainBatches(config.data, config.run.seed).micro_batches(4)
    module: Any = opened.module
    plain = sum(opened.evaluate(batch).nats for batch in batches) / (8 * 32)
    apply_precision(module.model.layers, config.precision)
    rounded = sum(opened.evaluate(batch).nats for batch in batches) / (8 * 32)
    assert losses[5] == pytest.approx(rounded, rel=1e-6)
    assert abs(rounded - plain) > 1e-5

    again = load_model(outcome.run.folder, torch.device("cpu"))
    assert again.config is not None
    assert again.config.precision == config.precision


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_float8_trains_alike_when_it_is_sharded(tiny_config: Path, world: World, recipe: str) -> None:
    """Emulated, for want of a GPU. In training it is near the plain run, and what is stored has the same names."""
    emulated = [f"precision.float8={recipe}", "precision.float8_emulated=true"]
    configs = [
        load_config(tiny_config, [*ONE_MICRO_BATCH, *typed])
        for typed in ([], emulated, [*emulated, "deepspeed.zero_stage=3"])
    ]
    plain, whole, sharded = (two_steps(config, world) for config in configs)
    assert sharded[:2] == pytest.approx(whole[:2], rel=2e-6)
    assert sharded[2:] == pytest.approx(whole[2:], rel=1e-3)
    assert whole == pytest.approx(plain, rel=0.05)
    assert abs(whole[0] - plain[0]) > 1e-6
    config = configs[1]
    layers: Any = torch.nn.Sequential(torch.nn.Linear(16, 16))
    float8.compute_in_float8(layers, config.precision)
    assert layers[0].config.emulate, "a CPU may well have these products, and other devices not"
    names = list(whole_weights(DeepSpeedEngine(config, world)))
    assert names == [row.name for row in plan_run(config).rows]


def test_float8_without_its_units_or_its_library_is_one_clear_error(
    tiny_config: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(tiny_config, ["precision.float8=rowwise"])
    with pytest.raises(ConfigError, match=r"needs a GPU of capability 8.9 or more, and this is a CPU: leave it out"):
        DeepSpeedEngine(config, world)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "A100")
    gpu = type(world)(0, 0, 1, torch.device("cuda", 0))
    with pytest.raises(ConfigError, match=r"8\.9 or more, and this is A100 with 8\.0"):
        DeepSpeedEngine(config, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 9))
    assert float8.refusal(config.precision, gpu.device, compiled=True) is None
    uncompiled = load_config(tiny_config, ["precision.float8=rowwise", "train.compile=false"])
    with pytest.raises(ConfigError, match=r"precision.float8 = rowwise with train.compile = false: .*leave train.comp"):
        DeepSpeedEngine(uncompiled, gpu)
    monkeypatch.setattr("plumbline.model.quantization.float8.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"needs torchao, which is missing: pip install -e '.\[float8\]'"):
        DeepSpeedEngine(config, gpu)
