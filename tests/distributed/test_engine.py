"""What one optimizer step computes, on a real engine of one rank: normalisation, dropout, what DeepSpeed was told."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import astuple, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine, deepspeed_config
from plumbline.launcher.runtime.engine.zero_shards import refuse_uneven
from plumbline.launcher.runtime.ranks.collectives import sum_over_ranks
from plumbline.launcher.runtime.ranks.deepspeed_start import SAID_OTHERWISE
from plumbline.launcher.runtime.scoring.scores import LossSums
from plumbline.model.decoder import CausalLM
from plumbline.model.parameterization.multipliers import multipliers
from tests.distributed.conftest import whole_weights

if TYPE_CHECKING:
    from plumbline.launcher.runtime.ranks.world import World


@pytest.fixture(scope="module")
def config(tiny_config: Path) -> Config:
    return load_config(tiny_config, ["model.dropout=0.3"])


def micro_batches(config: Config, step: int = 0) -> list[dict[str, Any]]:
    return [dict(batch) for batch in TrainBatches(config.data, config.run.seed).micro_batches(step)]


def test_dropout_is_a_function_of_seed_step_and_rank(
    engine: DeepSpeedEngine, config: Config, tiny_config: Path, world: World
) -> None:
    """With a learning rate of 0 nothing else can change between steps."""
    losses = {step: engine.train_step(micro_batches(config), step, 0.0).result.loss.item() for step in (3, 4, 5)}
    assert len(set(losses.values())) == 3, "each step drops other units"
    torch.manual_seed(99)
    assert engine.train_step(micro_batches(config), 4, 0.0).result.loss.item() == losses[4]
    engine.world = type(world)(rank=1, local_rank=1, size=1, device=world.device)
    assert engine.train_step(micro_batches(config), 4, 0.0).result.loss.item() != losses[4], "so does each rank"
    engine.world = world
    engine.config = load_config(tiny_config, ["model.dropout=0.3", "run.seed=2"])
    assert engine.train_step(micro_batches(config), 4, 0.0).result.loss.item() != losses[4], "and each seed"
    engine.config = config


@pytest.mark.parametrize("objective", ["next_token", "latent_lookahead"])
def test_compiling_changes_neither_names_nor_groups_nor_the_step(
    tiny_config: Path, world: World, objective: str
) -> None:
    engines = {}
    for compiled in (False, True):
        overrides = [f"train.compile={str(compiled).lower()}", f"objective.name={objective}"]
        config = load_config(tiny_config, overrides)
        engines[compiled] = engine = DeepSpeedEngine(config, world)
        engine.evaluate(micro_batches(config)[0])  # first, as after some resumes
        assert engine.train_step(micro_batches(config), 0, 1e-3).result.applied
    plain, compiled_engine = engines[False], engines[True]
    assert "compile" not in "".join(whole_weights(compiled_engine))
    for one, other in zip(plain.groups, compiled_engine.groups, strict=True):
        assert {k: v for k, v in one.items() if k != "params"} == {k: v for k, v in other.items() if k != "params"}
        assert [p.shape for p in one["params"]] == [p.shape for p in other["params"]]
    for (name, weight), (other_name, other_weight) in zip(
        whole_weights(plain).items(), whole_weights(compiled_engine).items(), strict=True
    ):
        assert name == other_name
        # Adam's first step is lr * sign(gradient): a gradient of rounding size may differ
        assert (weight - other_weight).abs().median() < 1e-7, name


def test_every_valid_token_weighs_the_same(tiny_config: Path, world: World) -> None:
    """Micro-batches with few valid labels count for little: loss and gradient are those of one big batch."""
    config = load_config(tiny_config, [])
    engine = DeepSpeedEngine(config, world)
    batches = micro_batches(config)
    assert len(batches) == 4
    for kept, batch in zip((32, 20, 3, 1), batches, strict=True):
        batch["labels"] = batch["labels"].clone()
        batch["labels"][:, kept:] = -100
    batches[3]["labels"][:] = -100  # nothing at all

    model = CausalLM(config.model, multipliers(config.model, config.parameterization))
    model.load_state_dict(whole_weights(engine))
    logits = model(torch.cat([batch["input_ids"] for batch in batches]))
    assert isinstance(logits, Tensor)
    labels = torch.cat([batch["labels"] for batch in batches]).flatten()
    loss = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    sums = sum((engine.evaluate(batch) for batch in batches), LossSums())
    assert astuple(sums) == pytest.approx((2 * 55 * loss.item(), 2 * 55), rel=1e-6)
    result = engine.train_step(batches, 0, 1e-3).result
    assert result.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    assert result.applied


def test_a_step_without_labels_is_no_broken_step(engine: DeepSpeedEngine, config: Config) -> None:
    """A guard would roll a run back for a loss of NaN, though such data lowers nothing."""
    batches = [{**batch, "labels": torch.full_like(batch["labels"], -100)} for batch in micro_batches(config)]
    result = engine.train_step(batches, 0, 0.0).result
    assert (result.loss.item(), result.grad_norm, result.applied) == (0, 0, True)


def test_evaluation_drops_nothing_and_changes_nothing(engine: DeepSpeedEngine, config: Config) -> None:
    batch = micro_batches(config)[0]
    before = whole_weights(engine)
    scores = [engine.evaluate(batch) for _ in range(2)]
    assert scores[0] == scores[1]
    assert not engine.logits(batch).requires_grad
    assert all(torch.equal(weight, before[name]) for name, weight in whole_weights(engine).items())


def asked_of(config: Config, world: World) -> dict[str, Any]:
    return deepspeed_config(config, plan_run(config).rows, world)


def test_buckets_hold_a_block_and_a_message_worth_sending(tiny_config: Path, world: World) -> None:
    """A block of Qwen3 of width D, MLP F: 4 D^2 + 3 D F, two norms of D, two of a head."""
    small = asked_of(load_config(tiny_config, []), world)["zero_optimization"]
    wide = ["model.hidden_size=2048", "model.num_attention_heads=32", "model.num_key_value_heads=32"]
    large = asked_of(load_config(tiny_config, [*wide, "model.intermediate_size=5632"]), world)
    assert small["allgather_bucket_size"] == small["stage3_prefetch_bucket_size"] == 2**24
    block = 4 * 2048**2 + 3 * 2048 * 5632 + 2 * 2048 + 2 * 64
    assert large["zero_optimization"]["reduce_bucket_size"] == block
    assert large["zero_optimization"]["stage3_prefetch_bucket_size"] == block


def test_at_stage_2_every_gradient_fits_into_a_bucket(tiny_config: Path, world: World) -> None:
    """Or DeepSpeed frees it while it is summed."""
    typed = ["deepspeed.zero_stage=2", "model.vocab_size=3001", "deepspeed.bucket_size=1000"]
    config = load_config(tiny_config, typed)
    assert asked_of(config, world)["zero_optimization"]["reduce_bucket_size"] == 3001 * 64
    engine = DeepSpeedEngine(config, world)
    reduced: list[bool] = []
    zero, sum_up = engine._engine.optimizer, engine._engine.optimizer.reduce_ipg_grads

    def watched(**options: Any) -> None:
        reduced.append(not zero.extra_large_param_to_reduce)
        sum_up(**options)

    zero.reduce_ipg_grads = watched
    engine.train_step(micro_batches(config), 0, 1e-3)
    assert set(reduced) == {True}


def test_deepspeed_reports_no_memory(tiny_config: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each report would collect Python's garbage, twice for each group."""
    from deepspeed.runtime import bf16_optimizer

    reports: list[str] = []

    def report(message: str, **_: bool) -> None:
        reports.append(message)

    monkeypatch.setattr(bf16_optimizer, "see_memory_usage", report)
    DeepSpeedEngine(load_config(tiny_config, ["deepspeed.precision=bf16", "deepspeed.zero_stage=1"]), world)
    assert reports == []
    assert bf16_optimizer.see_memory_usage is report, "other users of DeepSpeed have it back"


def test_deepspeeds_own_group_waits_as_long_as_ours(world: World) -> None:
    from deepspeed.utils import groups

    group: Any = groups._get_data_parallel_group()
    assert group is not dist.group.WORLD
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(minutes=5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_deepspeed_is_told_everything(tiny_config: Path, world: World, stage: int, precision: str) -> None:
    overrides = [f"deepspeed.zero_stage={stage}", f"deepspeed.precision={precision}", "deepspeed.bucket_size=1000"]
    asked = asked_of(load_config(tiny_config, overrides), world)
    assert (asked["train_batch_size"], asked["train_micro_batch_size_per_gpu"]) == (8, 2)
    assert asked["gradient_accumulation_steps"] == 4
    assert asked["zero_optimization"]["stage"] == stage
    assert asked["zero_optimization"]["reduce_bucket_size"] == (1000 if stage != 2 else 257 * 64)
    assert asked["zero_optimization"]["overlap_comm"] == (stage > 1)
    assert asked["gradient_clipping"] == (0.5 if stage else 0.0), "at stage 0 the engine clips itself"
    assert asked["bf16"]["enabled"] == (precision == "bf16" and stage > 0)
    assert asked["torch_autocast"]["enabled"] == (precision == "bf16" and stage == 0)
    assert asked["data_types"] == {"grad_accum_dtype": "fp32"}
    assert asked["communication_data_type"] == "fp32"
    assert asked["fp16"]["enabled"] is False


def test_a_rank_alone_copies_no_gradients_and_rounds_them_if_asked(tiny_config: Path, world: World) -> None:
    def step(*typed: str) -> tuple[float, bool]:
        config = load_config(tiny_config, ["deepspeed.zero_stage=1", "deepspeed.precision=fp32", *typed])
        engine = DeepSpeedEngine(config, world)
        norm = engine.train_step(micro_batches(config), 0, 1e-3).result.grad_norm
        return norm, engine.requested["zero_optimization"]["contiguous_gradients"]

    plain, copies = step()
    rounded, through_messages = step("deepspeed.communication_dtype=bf16")
    assert (copies, through_messages) == (False, True)
    assert rounded == pytest.approx(plain, rel=1e-2)
    assert rounded != plain
    two = replace(world, size=2)
    asked = asked_of(load_config(tiny_config, ["deepspeed.zero_stage=1", "deepspeed.precision=fp32"]), two)
    assert asked["zero_optimization"]["contiguous_gradients"], "what is sent is in one piece"


def test_deepspeed_follows_a_growing_batch(tiny_config: Path, world: World) -> None:
    """Two updates of two micro-batches and one of four; each is applied, and read back."""
    stages = "data.batch_size_warmup=[{tokens: 129, global_batch_size: 4}]"
    config = load_config(tiny_config, [stages])
    engine = DeepSpeedEngine(config, world)
    assert (engine._engine.train_batch_size(), engine._engine.gradient_accumulation_steps()) == (8, 4)
    for step, (batch_size, accumulation) in enumerate([(4, 2), (4, 2), (8, 4)]):
        before = whole_weights(engine)
        assert engine.train_step(micro_batches(config, step), step, 1e-3).result.applied
        found = (engine._engine.train_batch_size(), engine._engine.gradient_accumulation_steps())
        assert found == (batch_size, accumulation)
        assert engine._engine.global_steps == step + 1, "one update a step"
        assert not all(torch.equal(weight, before[name]) for name, weight in whole_weights(engine).items())


@pytest.mark.parametrize(("key", "value"), [("gradient_clipping", 0.25), ("train_batch_size", 16)])
def test_what_deepspeed_did_not_adopt_is_refused(
    engine: DeepSpeedEngine, config: Config, world: World, key: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "requested", asked_of(config, world))
    engine._verify()
    monkeypatch.setitem(engine.requested, key, value)
    with pytest.raises(
        RuntimeError, match=f"did not adopt its configuration: {key.replace('_', '.')} is .*, asked for {value}"
    ):
        engine._verify()


def test_no_message_is_sent_without_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """An objective that reports nothing has nothing to sum over ranks, and NCCL is not asked to; nor by one rank."""
    sent: list[int] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: sent.append(tensor.numel()))
    for ranks in (1, 2):
        monkeypatch.setattr(dist, "get_world_size", lambda ranks=ranks: ranks)
        for length in (0, 3):
            sum_over_ranks(torch.ones(length))
    assert sent == [3]


def test_stage_3_moves_every_buffer_to_the_device(tiny_config: Path, world: World) -> None:
    """DeepSpeed leaves them; the meta device stands in for a GPU, for what lies there can be told from the CPU's."""
    config = load_config(tiny_config, ["deepspeed.zero_stage=3", "model.attention=pruned"])
    engine = DeepSpeedEngine(config, replace(world, device=torch.device("meta")))
    places = {name: buffer.device.type for name, buffer in engine.model.named_buffers()}
    assert any(name.endswith("self_attn.alpha") for name in places)
    assert set(places.values()) == {"meta"}


ODD = ["model.attention_sink=true", "model.branch_gain=scalar", "model.family=gpt2"]
"""Tensors of 2 sinks and of 1 gain in each block."""


@pytest.mark.parametrize("stage", [1, 2])
def test_tensors_of_all_blocks_lie_where_code_compiled_for_one_reads_them(
    tiny_config: Path, world: World, stage: int
) -> None:
    config = load_config(tiny_config, [*ODD, f"deepspeed.zero_stage={stage}", "deepspeed.precision=bf16"])
    model = DeepSpeedEngine(config, world).model
    assert {parameter.numel() for parameter in model.parameters()} > {1, 2}
    assert any(parameter.storage_offset() for parameter in model.parameters()), "they are in flat buffers"
    refuse_uneven(model)


@pytest.mark.parametrize(("odd", "refused"), [([], False), (ODD, True)])
def test_tensors_that_stage_3_lays_behind_odd_ones_are_refused(
    tiny_config: Path, world: World, odd: list[str], refused: bool
) -> None:
    config = load_config(tiny_config, [*odd, "deepspeed.zero_stage=3", "deepspeed.precision=bf16"])
    model = DeepSpeedEngine(config, world).model
    expected = pytest.raises(ConfigError, match=r"zero_stage = 3 on one GPU: .* lies behind tensors of an odd size")
    with expected if refused else nullcontext():
        refuse_uneven(model)


class Copies(TorchDispatchMode):
    """Note which tensors of bf16 are copied to fp32."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "_to_copy" and made.dtype == torch.float32:
            self.shapes.append(args[0].shape)
        return made


def test_gradients_are_added_to_their_sum_without_a_copy(tiny_config: Path, world: World) -> None:
    config = load_config(tiny_config, ["deepspeed.precision=bf16"])
    engine = DeepSpeedEngine(config, world)
    with Copies() as copied:
        assert engine.train_step(micro_batches(config), 0, 1e-3).result.applied
    assert engine.model.get_parameter("model.layers.0.mlp.up_proj.weight").shape not in copied.shapes


def test_what_deepspeed_is_not_to_say_is_what_it_says(world: World) -> None:
    """Its words are looked for in its sources: if it words them otherwise, they would be shown again."""
    assert not logging.getLogger("DeepSpeed").filter(
        logging.makeLogRecord({"msg": "**** You are using ZeRO with an untested optimizer, proceed with caution *****"})
    )
    sources = [file.read_text() for file in (Path(deepspeed.__file__).parent / "runtime").rglob("*.py")]
    assert [words for words in SAID_OTHERWISE if not any(words in text for text in sources)] == []
