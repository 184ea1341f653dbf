"""What a micro-batch is said to take, the allocator gives it; less where the backward pass computes again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.activations import activation_bytes, count_activations
from plumbline.launcher.runtime.engine.build import blocks_of, build_model
from plumbline.model.attention.softmax import SoftmaxAttention
from plumbline.model.objectives.objective import TrainedLM
from plumbline.model.parameterization.tensors import freeze
from plumbline.model.recomputation import Recomputed, recompute

SHAPE = [
    "model.hidden_size=128",
    "model.intermediate_size=384",
    "model.num_hidden_layers=4",
    "data.sequence_length=128",
]
MODELS = {
    "qwen3": ["model.family=qwen3"],
    "gpt2": ["model.family=gpt2", "model.num_key_value_heads=2"],
    "outlier_protected": ["model.family=outlier_protected"],
    "dropout": ["model.dropout=0.1"],
    "value_residual": ["model.value_residual=true"],
    "mixit": ["model.family=mixit"],
    "latent_lookahead": ["objective.name=latent_lookahead", "objective.horizon=2", "model.document_mask=true"],
    "multi_token": ["objective.name=multi_token", "objective.horizon=2"],
    "rounded": ["precision.weights=4"],
}
MICRO_BATCH = 8


def built(config: Config, recomputed: Recomputed) -> tuple[TrainedLM, dict[str, Tensor]]:
    """Return a model with values, and a batch for it."""
    model = build_model(config).train()
    freeze(model, config.model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
    model.to(torch.bfloat16 if config.deepspeed.precision == "bf16" else torch.float32)
    recompute(blocks_of(model), recomputed)
    shape = (MICRO_BATCH, config.data.sequence_length)
    batch = {
        "input_ids": torch.ones(shape, dtype=torch.int64),
        "labels": torch.ones(shape, dtype=torch.int64),
        "document_ids": torch.zeros(shape, dtype=torch.int32),
        "positions": torch.arange(shape[1], dtype=torch.int32).expand(shape).contiguous(),
        "sample_index": torch.arange(MICRO_BATCH),
    }
    model.objective.on_step(model, 1)
    return model, batch


def allocated(model: TrainedLM, batch: dict[str, Any]) -> int:
    """Return the most bytes that torch's allocator has given out in a forward and a backward pass."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        model.losses(batch, 1).terms.sum().backward()
    assert seen.profiler is not None
    now = peak = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


@pytest.mark.parametrize("recomputed", ["none", "selective", 4, "full"])
@pytest.mark.parametrize("model", sorted(MODELS.keys() - {"multi_token", "latent_lookahead"}))
def test_a_deep_model_is_two_shallow_ones_and_as_much_for_each_period(
    tiny_config: Path, model: str, recomputed: Recomputed
) -> None:
    config = load_config(tiny_config, [*MODELS[model], "model.num_hidden_layers=19"])
    counted = count_activations(config, 2, 1, recomputed, on_gpu=True)
    assert activation_bytes(config, 2, 1, recomputed, on_gpu=True) == counted


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recomputed", ["none", "selective", "full", 2])
@pytest.mark.parametrize("model", MODELS)
def test_a_micro_batch_takes_what_is_said(
    tiny_config: Path, model: str, recomputed: Recomputed, precision: str
) -> None:
    config = load_config(tiny_config, [*SHAPE, *MODELS[model], f"deepspeed.precision={precision}"])
    measured = allocated(*built(config, recomputed))
    assert activation_bytes(config, MICRO_BATCH, 1, recomputed, on_gpu=False) == pytest.approx(measured, rel=0.1)


def kept(model: TrainedLM, batch: dict[str, Any]) -> int:
    """Return the bytes that autograd saves in a forward pass, each storage once and weights not at all."""
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    sizes: dict[int, int] = {}
    held = []

    def note(tensor: Tensor) -> Tensor:
        held.append(tensor)  # or another one could have its place
        sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.losses(batch, 1)
    return sum(size for key, size in sizes.items() if key not in own)


@pytest.mark.parametrize("model", ["qwen3", "gpt2", "outlier_protected"])
def test_a_block_keeps_for_the_backward_pass_what_is_said(tiny_config: Path, model: str) -> None:
    """Of two models, one of which has four blocks more: all else falls out of the difference."""

    def difference(count: Any) -> int:
        typed = ([*SHAPE, *MODELS[model], f"model.num_hidden_layers={layers}"] for layers in (8, 4))
        more, fewer = (count(load_config(tiny_config, each)) for each in typed)
        return int(more - fewer)

    measured = difference(lambda config: kept(*built(config, "none")))
    assert difference(lambda config: activation_bytes(config, MICRO_BATCH, 1, "none", on_gpu=False)) == pytest.approx(
        measured, rel=0.1
    )


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_computed_again_takes_no_memory(tiny_config: Path, model: str, on_gpu: bool) -> None:
    config = load_config(tiny_config, [*SHAPE, *MODELS[model]])
    none, selective, every_second, full = (
        activation_bytes(config, 64, 1, each, on_gpu) for each in ("none", "selective", 2, "full")
    )
    assert full < selective < none
    assert full < every_second < none


@pytest.mark.parametrize(
    ("typed", "factor"),
    [(["model.dropout=0.1"], 2.0), (["deepspeed.precision=bf16"], 1.2), (["model.family=gpt2"], 1.0)],
)
def test_kernels_on_gpus_keep_less(tiny_config: Path, typed: list[str], factor: float) -> None:
    uncompiled = ["train.compile=false", "data.sequence_length=512", "model.num_key_value_heads=2"]
    config = load_config(tiny_config, [*SHAPE, *typed, *uncompiled])
    on_cpu, on_gpu = (activation_bytes(config, 4, 1, "none", each) for each in (False, True))
    assert on_cpu >= factor * on_gpu


def test_a_gpu_has_larger_chunks_of_logits(tiny_config: Path) -> None:
    """One tensor of them in fp32 and two in bf16, of 4,096 tokens and of 512; and what the chunk before has left."""
    typed = ["model.vocab_size=65536", "deepspeed.precision=bf16", "train.compile=false"]
    config = load_config(tiny_config, typed)
    on_cpu, on_gpu = (activation_bytes(config, 128, 1, "none", each) for each in (False, True))
    assert on_gpu - on_cpu == pytest.approx((4096 * 8 - 512 * 10) * 65536, rel=0.03)


def test_a_compiled_loss_takes_three_tensors_of_logits(tiny_config: Path) -> None:
    """Of bf16: a gradient, the next chunk's logits, and their gradient. Uncompiled one more, in fp32."""
    typed = ["model.vocab_size=65536", "deepspeed.precision=bf16"]
    compiled, uncompiled = (
        activation_bytes(load_config(tiny_config, [*typed, *more]), 256, 1, "none", on_gpu=True)
        for more in ([], ["train.compile=false"])
    )
    assert uncompiled - compiled == pytest.approx(4096 * 65536 * 4, rel=0.01)


def test_a_norm_whose_weight_has_another_dtype_is_fused_on_no_gpu(tiny_config: Path) -> None:
    """At stage 0 bf16 is autocast: the norms of queries and keys get bf16 and have weights in fp32."""
    typed = [*SHAPE, "deepspeed.precision=bf16", "model.num_key_value_heads=2"]
    config = load_config(tiny_config, typed)
    without = load_config(tiny_config, [*typed, "model.qk_norm=none"])
    on_gpu = [
        activation_bytes(config, 64, stage, "none", on_gpu=True) - activation_bytes(without, 64, stage, "none", True)
        for stage in (0, 1)
    ]
    assert on_gpu[0] > 2 * on_gpu[1]


def test_masks_in_blocks_take_nothing_until_an_evaluation_writes_them_out(tiny_config: Path) -> None:
    def taken(length: int, *typed: str) -> int:
        shape = [f"data.sequence_length={length}", f"model.max_position_embeddings={length}", "model.vocab_size=512"]
        shape += ["data.micro_batch_size=2", "deepspeed.precision=bf16", "model.head_dim=16"]
        return activation_bytes(load_config(tiny_config, [*shape, *typed]), 1, 1, "none", on_gpu=True)

    masked = "model.document_mask=true"
    assert taken(512, masked) == taken(512)
    assert taken(512, masked, "train.block_masks=false") > taken(512)
    assert taken(512, masked, "train.compile=false") > taken(512)
    # Three maps of one byte: the triangle, which documents are the same, and both; an evaluation has both sequences
    assert taken(16_384, masked) == pytest.approx(2 * 3 * 16_384**2, rel=0.01) != taken(16_384)
    assert taken(16_384, "model.sliding_window=64") > 8 * 16_384**2 > taken(16_384), "distances are of 8 bytes"


def test_an_evaluated_task_takes_all_of_its_logits_at_once(tiny_config: Path) -> None:
    """Training makes them in chunks, of which tokens without a label are left out."""
    source = "{task: {name: star_graph, arms: 2, path_length: 4, nodes: 12}}"
    shape = ["model.vocab_size=50304", "data.micro_batch_size=64", "train.activation_checkpointing=full"]
    trained, scored = (
        activation_bytes(load_config(tiny_config, [*shape, *typed]), 1, 1, "full", on_gpu=True)
        for typed in ([], [f"data.validation=[{source}]"])
    )
    assert scored == pytest.approx(64 * 32 * 50304 * 8, rel=0.01)
    assert trained < scored / 4


@pytest.mark.parametrize(
    ("typed", "repeats"),
    [
        (["deepspeed.precision=fp32"], True),
        (["deepspeed.precision=bf16"], False),
        (["deepspeed.precision=bf16", "model.document_mask=true", "train.block_masks=false"], True),
    ],
)
def test_shared_heads_are_repeated_where_a_gpu_repeats_them(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch, typed: list[str], repeats: bool
) -> None:
    """In fp32, or with a mask that is written out, keys and values of each block are kept for each head of queries."""
    heads = ["model.num_attention_heads=8", "model.num_key_value_heads=1", "model.head_dim=16"]
    config = load_config(tiny_config, [*SHAPE, *heads, *typed])
    size = 4 if "deepspeed.precision=fp32" in typed else 2
    repeated = 4 * 2 * MICRO_BATCH * 8 * 128 * 16 * size  # blocks, keys and values, sequences, heads, tokens, channels
    counted = activation_bytes(config, MICRO_BATCH, 1, "none", on_gpu=True)
    ignored = property(lambda _self: False, lambda _self, _value: None)
    monkeypatch.setattr(SoftmaxAttention, "counts_for_gpu", ignored)
    without = activation_bytes(config, MICRO_BATCH, 1, "none", on_gpu=True)
    assert counted - without == pytest.approx(repeated if repeats else 0, rel=0.2)
