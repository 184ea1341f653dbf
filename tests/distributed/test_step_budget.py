"""What a step costs beside its arithmetic: reads of the host, messages, bytes, garbage; docs/performance.md has it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.engine.network import messages

if TYPE_CHECKING:
    from tests.conftest import Start

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
STAGES = {
    f"ZeRO-{stage}, {precision}": [f"deepspeed.zero_stage={stage}", f"deepspeed.precision={precision}"]
    for precision in ("fp32", "bf16")
    for stage in range(4)
}
ROUNDED = {
    f"ZeRO-{stage}, bf16, summed in bf16": [*STAGES[f"ZeRO-{stage}, bf16"], "deepspeed.communication_dtype=bf16"]
    for stage in range(4)
}
SMALL_BUCKETS = {
    f"ZeRO-{stage}, bf16, `deepspeed.bucket_size: 10000`": [
        *STAGES[f"ZeRO-{stage}, bf16"],
        "deepspeed.bucket_size=10000",
    ]
    for stage in (1, 2, 3)
}
"""Buckets that the model is larger than, as large models are larger than the default ones."""
EXTRAS = {
    "`train.ema_half_life_tokens`": ["train.ema_half_life_tokens=1000"],
    "`optimizer.grad_clip_norm: base`": ["optimizer.grad_clip_norm=base"],
    "`optimizer.name: muon`": ["optimizer.name=muon"],
    "`deepspeed.offload_optimizer`, ZeRO-2": ["deepspeed.zero_stage=2", "deepspeed.offload_optimizer=true"],
}
"""Settings that make the host read, at stage 1 in fp32 if nothing is said."""


@pytest.fixture(scope="module")
def found(start: Start, tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("budget")
    program, settings = (
        Path(__file__).with_name("step_budget.py"),
        json.dumps(STAGES | ROUNDED | SMALL_BUCKETS | EXTRAS),
    )
    outcome = start(program, [tiny_config, folder / "found.json", settings], folder, ranks=2).wait()
    assert outcome.code == 0, outcome.stderr
    measured: dict[str, Any] = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return measured


def row(name: str, seen: dict[str, Any]) -> str:
    """Return a line of the page's table."""
    large = [
        f"{count} {operator} {dtype} {size / seen['parameters']:.1f}" for operator, dtype, count, size in seen["large"]
    ]
    return f"| {name} | {sum(seen['reads'].values())} | {seen['small']} | {'; '.join(large)} |"


def test_the_page_says_what_a_step_costs(found: dict[str, Any]) -> None:
    expected = [row(name, seen) for name, seen in found.items()]
    written = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line for line in expected if line not in written] == [], "\n".join(expected)


@pytest.mark.parametrize("name", STAGES | ROUNDED | SMALL_BUCKETS)
def test_plan_knows_what_is_sent(found: dict[str, Any], tiny_config: Path, name: str) -> None:
    """Two micro-batches a step, as `step_budget.py` makes them; DeepSpeed pads, by up to 2 % of so small a model."""
    seen, config = found[name], load_config(tiny_config, (STAGES | ROUNDED | SMALL_BUCKETS)[name])
    kinds = {"allreduce": "reduced", "reduce_scatter_base": "scattered", "allgather_base": "gathered"}
    sums = dict.fromkeys(kinds.values(), 0)
    for operator, _, _, size in seen["large"]:
        sums[kinds[operator]] += size
    expected = messages(config, seen["parameters"], config.deepspeed.zero_stage, config.data.accumulation_steps(2))
    assert sums == pytest.approx(asdict(expected), rel=0.02)


@pytest.mark.parametrize("name", SMALL_BUCKETS)
def test_gradients_are_summed_while_others_are_computed(found: dict[str, Any], name: str) -> None:
    """All but those that the backward pass completes last, of the embedding and the first block."""
    seen = found[name]
    assert seen["early"] > 4 * 0.5 * seen["parameters"], seen


@pytest.mark.parametrize("name", STAGES | ROUNDED | SMALL_BUCKETS)
def test_the_host_reads_nothing_while_a_step_is_made(found: dict[str, Any], name: str) -> None:
    assert found[name]["reads"] == {}


@pytest.mark.parametrize("name", EXTRAS)
def test_what_makes_the_host_read_is_seen(found: dict[str, Any], name: str) -> None:
    assert found[name]["reads"]


@pytest.mark.parametrize("name", [*STAGES, *EXTRAS])
def test_a_step_leaves_no_tensor_to_the_garbage_collector(found: dict[str, Any], name: str) -> None:
    """Or memory would grow, for nothing is collected amid training."""
    assert found[name]["garbage"] == 0
