"""docs/library.md is run as it stands; and what it says of the functions holds."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.models.open import load_model
from plumbline.launcher.runtime.optim.optimizer import parameter_groups
from plumbline.model.build import build_decoder
from tests.conftest import Run

if TYPE_CHECKING:
    from tests.conftest import Pretrain

PAGE = (Path(__file__).parents[1] / "docs" / "library.md").read_text(encoding="utf-8")
CODE = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def trained(run_pretrain: Pretrain, tiny_config: Path) -> Path:
    settings = ("data.sequence_length=64", "train.steps=6", "schedule.warmup=1steps", "train.eval_interval=null")
    outcome = run_pretrain(tiny_config, "library", settings, launcher="python")
    assert outcome.code == 0, outcome.stderr
    return outcome.run.folder


def test_the_page_runs_as_it_stands(
    trained: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, made in (("runs/quickstart", trained), ("corpora/stdlib", corpus)):
        (tmp_path / place).parent.mkdir()
        (tmp_path / place).symlink_to(made)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    assert len(CODE) == 5
    for code in CODE:
        exec(compile(code, "docs/library.md", "exec"), names)
    assert names["logits"].shape == (1, len(names["prompt"]), 257)
    assert len(names["text"]) > 0
    rates = {group["name"]: group["lr_multiplier"] for group in names["optimizer"].param_groups}
    assert (rates["hidden_matrix"], rates["embedding+unembedding"]) == (0.5, 1.0)
    assert names["losses"][-1] < names["losses"][0]
    assert [batch["sample_index"].tolist() for batch in names["again"]] == [[24, 25, 26, 27], [28, 29, 30, 31]]
    assert len(names["reports"]) == 14
    assert 0 < names["worst"].output_sqnr < 40
    assert float(names["predicted"]) == pytest.approx(1.7 + 400 / 1e9**0.34 + 400 / 2e10**0.28, abs=1e-3)


def test_every_function_that_the_page_names_is_there() -> None:
    named = re.findall(r"`(plumbline\.[\w.]+)\.(\w+)`", PAGE)
    assert len(named) >= 8
    for module, function in named:
        assert callable(getattr(importlib.import_module(module), function)), f"{module}.{function}"


def test_a_loop_of_ones_own_makes_the_steps_of_pretrain(trained: Path) -> None:
    """Ten lines with AdamW of torch: the same first values, groups, order and losses as by DeepSpeed."""
    config = load_model(trained).config
    assert config is not None
    plan, optimizing = plan_run(config), config.optimizer
    model = build_decoder(config.model, config.parameterization, config.run.seed, "cpu")
    groups = parameter_groups(model, config.parameterization, optimizing.lr, optimizing.weight_decay, optimizing.eps)
    optimizer, losses = torch.optim.AdamW(groups), []
    for step, micro_batches in enumerate(TrainBatches(config.data, config.run.seed).iterate(0, 6)):
        targets, total = sum(int((batch["labels"] >= 0).sum()) for batch in micro_batches), 0.0
        for batch in micro_batches:
            loss, nats = model(batch["input_ids"], batch["labels"], batch["document_ids"], batch["positions"])
            (loss / targets).backward()
            total += float(nats)
        torch.nn.utils.clip_grad_norm_(model.parameters(), optimizing.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = group["lr_multiplier"] * plan.lr_after(plan.batch_plan.tokens_before(step))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / targets)
    logged = list(Run(trained).column("loss").values())
    assert losses[0] == pytest.approx(logged[0], rel=1e-6)
    assert losses == pytest.approx(logged, rel=1e-4)
