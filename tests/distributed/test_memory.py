"""The memory that plan.py promises is what ranks take, to a tenth; docs/performance.md has the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.conftest import Start

MODEL = [
    "model.hidden_size=512", "model.intermediate_size=1536", "model.num_hidden_layers=4",
    "parameterization.base_hidden_size=256", "deepspeed.bucket_size=1048576",
]  # fmt: skip
"""12.9 million parameters, beside which constants do not matter, in buckets of a twelfth."""


def variants(kind: str, stages: Iterable[int], overrides: list[str]) -> dict[str, list[str]]:
    """Return overrides by name, for stages in both precisions, a step being one micro-batch or two."""
    return {
        f"{kind}ZeRO-{stage}, {precision}, {count} micro-batches": [
            *overrides,
            f"deepspeed.zero_stage={stage}",
            f"deepspeed.precision={precision}",
            f"data.micro_batch_size={4 // count}",
        ]
        for precision in ("fp32", "bf16")
        for stage in stages
        for count in (1, 2)
    }


STAGES = {**variants("", range(4), []), **variants("offloaded, ", range(1, 4), ["deepspeed.offload_optimizer=true"])}
OTHERS = {
    # Its orthogonal steps are in bf16, which some processors have to emulate: an eighth of the work
    "muon": [
        "optimizer.name=muon", "deepspeed.precision=bf16",
        "model.hidden_size=256", "model.intermediate_size=768", "deepspeed.bucket_size=262144",
    ],
    **{
        f"any ranks, ZeRO-{stage}, {precision}": [
            "run.reproducible=any_ranks", f"deepspeed.zero_stage={stage}", f"deepspeed.precision={precision}",
            "data.micro_batch_size=1",
        ]
        for stage, precision in ((0, "bf16"), (1, "fp32"), (1, "bf16"), (2, "bf16"))
    },
    "average": ["train.ema_half_life_tokens=1000", "deepspeed.precision=bf16"],
    **{
        f"frozen MLPs, ZeRO-{stage}, {precision}": [
            "model.frozen_mlp=true", f"deepspeed.zero_stage={stage}", f"deepspeed.precision={precision}",
        ]
        for stage, precision in ((0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16"))
    },
}  # fmt: skip
SETTINGS = {**STAGES, **OTHERS}


def compare(start: Start, config: Path, folder: Path, names: list[str], ranks: int = 2) -> None:
    settings = json.dumps({name: [*MODEL, *SETTINGS[name]] for name in names})
    program = Path(__file__).with_name("measure_memory.py")
    outcome = start(program, [config, folder / "found.json", settings], folder, ranks=ranks).wait()
    assert outcome.code == 0, outcome.stderr
    found: dict[str, dict[str, Any]] = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    rows = []
    for name, seen in found.items():
        measured, estimated = (seen[key] / seen["parameters"] for key in ("peak", "estimated"))
        rows.append(f"| {name} | {measured:.1f} | {estimated:.1f} |")
    print("\n".join(rows))
    wrong = [name for name, seen in found.items() if seen["estimated"] != pytest.approx(seen["peak"], rel=0.1)]
    assert wrong == [], "\n".join(rows)


def test_one_rank_takes_what_plan_says(start: Start, tiny_config: Path, tmp_path: Path) -> None:
    """It has nobody to send gradients to, at stage 0 and, in bf16, stage 1."""
    names = [f"ZeRO-{stage}, {precision}, 2 micro-batches" for stage in (0, 1) for precision in ("fp32", "bf16")]
    compare(start, tiny_config, tmp_path, names, ranks=1)


@pytest.mark.parametrize("stage", range(4))
def test_ranks_take_what_plan_says(start: Start, tiny_config: Path, tmp_path: Path, stage: int) -> None:
    compare(start, tiny_config, tmp_path, [name for name in STAGES if f"ZeRO-{stage}" in name])


def test_what_else_has_state_takes_what_plan_says(start: Start, tiny_config: Path, tmp_path: Path) -> None:
    compare(start, tiny_config, tmp_path, list(OTHERS))
