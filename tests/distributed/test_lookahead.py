"""Latent lookahead through the engine: every ZeRO stage and world size trains the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open

import plumbline.launcher.export
import plumbline.launcher.generate
from plumbline.launcher.runtime.models.continuing import read_think
from plumbline.launcher.runtime.models.open import load_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Command, Pretrain, Run
    from tests.distributed.conftest import TrainMatrix

LOOKAHEAD = [
    "objective.name=latent_lookahead",
    "objective.horizon=3",
    "objective.anchors=4",
    "objective.weight=1.0",
    "model.document_mask=true",
    "train.eval_interval=null",  # at the end all the same
    "train.eval_batches=1",
    "metrics.diagnostics_interval=2",
    "train.steps=3",
]
STAGES = {f"stage_{stage}": [f"deepspeed.zero_stage={stage}"] for stage in range(4)}
BASELINES = {
    "multi_token": ["objective.name=multi_token", "objective.horizon=3"],
    "sequential_mtp": ["objective.name=sequential_mtp", "objective.horizon=3"],
    "registers": ["objective.name=registers"],
    "pause": ["objective.name=pause", "objective.horizon=3"],
    "coconut": ["objective.name=coconut", "objective.horizon=3"],
}
KINDS = {  # switches that do not touch each other share a run
    "commit_detached": ["objective.commit=thoughts", "objective.detach_states=true"],
    "append_entropy": ["objective.within=causal", "objective.anchor_policy=entropy"],
    "fixed": ["objective.growth=fixed"],
}
REST = {
    "usual": ["deepspeed.zero_stage=1"],
    "bf16_0": ["deepspeed.precision=bf16", "deepspeed.zero_stage=0"],
    "bf16_3": ["deepspeed.precision=bf16", "deepspeed.zero_stage=3"],
    "checkpointed": ["deepspeed.zero_stage=3", "train.activation_checkpointing=full"],
    **{f"{kind}_{stage}": [*KINDS[kind], f"deepspeed.zero_stage={stage}"] for kind in KINDS for stage in (1, 3)},
}
ONE_MICRO_BATCH = ["data.global_batch_size=4"]  # for each rank and step: accumulation is what STAGES are for


@pytest.fixture(scope="module")
def runs(train_matrix: TrainMatrix, tiny_config: Path) -> Callable[[str], Run]:
    """Return the finished runs by two ranks, and of one by a single rank."""
    two = {f"look_{name}": [*LOOKAHEAD, *overrides] for name, overrides in STAGES.items()}
    two |= {f"look_{name}": [*LOOKAHEAD, *ONE_MICRO_BATCH, *overrides] for name, overrides in REST.items()}
    plain = [*ONE_MICRO_BATCH, *(override for override in LOOKAHEAD if not override.startswith("objective."))]
    for name, overrides in BASELINES.items():
        two |= {f"look_{name}_{stage}": [*plain, *overrides, f"deepspeed.zero_stage={stage}"] for stage in (1, 3)}
    one = {"look_single": [*LOOKAHEAD, *STAGES["stage_1"], "train.eval_batches=4"]}
    by_two, by_one = train_matrix(tiny_config, two), train_matrix(tiny_config, one, ranks=1)
    return lambda name: (by_one if name == "single" else by_two)(f"look_{name}")


def curves(run: Run) -> dict[str, list[float]]:
    steps = [record for record in run.records if "loss" in record]
    names = [name for name in steps[0] if "loss" in name or name == "grad_norm"]
    return {name: [record[name] for record in steps] for name in names}


@pytest.mark.parametrize(
    ("name", "other"), [*((name, "stage_0") for name in [*list(STAGES)[1:], "single"]), ("checkpointed", "usual")]
)
def test_stages_and_world_sizes_agree(runs: Callable[[str], Run], name: str, other: str) -> None:
    found, expected = curves(runs(name)), curves(runs(other))
    for curve, values in expected.items():
        assert found[curve] == pytest.approx(values, rel=2e-5), curve


@pytest.mark.parametrize("kind", KINDS)
def test_stage_3_agrees_on_every_kind_of_thought(runs: Callable[[str], Run], kind: str) -> None:
    found, expected = curves(runs(f"{kind}_3")), curves(runs(f"{kind}_1"))
    for curve, values in expected.items():
        assert found[curve] == pytest.approx(values, rel=2e-5), curve
    assert expected["loss"] != pytest.approx(curves(runs("usual"))["loss"], rel=5e-5), "the kinds differ"


@pytest.mark.parametrize("name", BASELINES)
def test_stages_agree_on_the_baselines(runs: Callable[[str], Run], name: str) -> None:
    found, expected = curves(runs(f"{name}_3")), curves(runs(f"{name}_1"))
    reports = {"registers": 1, "multi_token": 2, "sequential_mtp": 2}.get(name, 0)
    assert len(expected) == 2 + reports
    for curve, values in expected.items():
        assert found[curve] == pytest.approx(values, rel=2e-5), curve


@pytest.mark.parametrize("name", ["bf16_0", "bf16_3"])
def test_bf16_is_close(runs: Callable[[str], Run], name: str) -> None:
    assert curves(runs(name))["loss"] == pytest.approx(curves(runs("usual"))["loss"], rel=5e-3)


@pytest.mark.parametrize("think", ["never", "first", "every:2", "probability:0.5", "entropy:0.5", "verify"])
def test_a_run_decodes_with_and_without_thoughts(
    runs: Callable[[str], Run], think: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*options: str) -> dict[str, Any]:
        arguments = ["--prompt", "def ", "--max-new-tokens", "12", "--temperature", "0", "--json", *options]
        monkeypatch.setattr(sys, "argv", ["generate.py", "--model", str(runs("stage_1").folder), *arguments])
        plumbline.launcher.generate.main()
        facts: dict[str, Any] = json.loads(capsys.readouterr().out)
        return facts

    facts, plain = said("--think", think), said()
    assert len(facts["samples"][0]["tokens"]) == len(plain["samples"][0]["tokens"])
    if think in ("never", "verify"):
        assert facts["samples"] == plain["samples"]
    assert ("accepted" in facts) == (think == "verify")


@pytest.mark.parametrize("think", ["verify:2", "often", "every:0", "every:1.5", "probability:2", "entropy:-1"])
def test_an_unknown_way_to_think_is_refused(think: str) -> None:
    with pytest.raises(ValueError, match=f"--think {think}: it is never, first, every:TOKENS"):
        read_think(think, 0.0)
    with pytest.raises(ValueError, match="add --temperature 0"):
        read_think("verify", 0.8)


def test_a_plain_model_cannot_think(runs: Callable[[str], Run]) -> None:
    model = load_model(runs("multi_token_1").folder, torch.device("cpu"), with_objective=True)
    with pytest.raises(ValueError, match="decoding with thoughts is for runs with"):
        assert model.decoding


def test_thoughts_without_a_target_are_refused_before_the_first_step(run_pretrain: Pretrain, tiny_config: Path) -> None:
    task = "data.train=[{task: {name: addition, digits: 2}}]"
    thinking = ["objective.name=latent_lookahead", "objective.horizon=9", "objective.anchor_policy=entropy"]
    outcome = run_pretrain(tiny_config, "no_targets", [task, *thinking, "data.sequence_length=16"])
    assert outcome.code == 2
    assert "no token of the first batch has a target for the loss of lookahead" in outcome.stderr
    assert not outcome.run.records


def test_silent_thoughts_are_scored_alone(
    runs: Callable[[str], Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Decoding them is refused, and an export says that its plain model was not trained."""
    run, folder = runs("pause_1").folder, tmp_path / "export"
    with pytest.raises(ValueError, match="the thoughts of pause are in evaluations alone"):
        assert load_model(run, torch.device("cpu"), with_objective=True).decoding
    monkeypatch.setattr(sys, "argv", ["export.py", "--model", str(run), "--output", str(folder)])
    plumbline.launcher.export.main()
    assert "warning: It was trained to predict with thoughts" in capsys.readouterr().err
    assert "trained to predict with thoughts before the text (pause: horizon 3" in (folder / "README.md").read_text()


@pytest.mark.proof
def test_every_command_says_that_it_shows_a_mode_that_was_not_trained(
    runs: Callable[[str], Run], corpus: Path, tmp_path: Path, command: Command
) -> None:
    """Not where thoughts are asked for; the report names the loss that was trained."""
    silent, committed, plain = (runs(f"{name}_1").folder for name in ("pause", "commit_detached", "registers"))
    few = ("--data", corpus, "--max-batches", "1")

    def warned(*arguments: str | Path) -> bool:
        done = command(str(arguments[0]), *arguments[1:])
        assert done.returncode == 0, done.stderr
        return "It was trained to predict with thoughts" in done.stderr + done.stdout

    assert warned("eval", "--model", silent, *few)
    assert not warned("eval", "--model", silent, *few, "--thinking")
    assert warned("generate", "--model", committed, "--max-new-tokens", "2")
    assert not warned("generate", "--model", committed, "--max-new-tokens", "2", "--think", "first")
    assert warned("quantize", "--model", silent, *few, "--recipes", "rtn-w8", "--output", tmp_path / "rows")
    page = tmp_path / "page.html"
    assert warned("report", silent, "--output", page)
    result = json.loads((silent / "result.json").read_text())
    assert f"Held-out loss with thoughts: email {result['eval/email/thinking_loss']:.4f}." in page.read_text()
    assert not warned("report", plain, "--output", page)
    assert f"Held-out loss: email {json.loads((plain / 'result.json').read_text())['eval/email/loss']:.4f}." in (
        page.read_text()
    )


@pytest.mark.proof
def test_an_export_says_that_further_heads_are_left_out(
    runs: Callable[[str], Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs("registers_1").folder
    monkeypatch.setattr(sys, "argv", ["export.py", "--model", str(run), "--output", str(tmp_path / "export")])
    plumbline.launcher.export.main()
    assert "left out: 64 parameters of registers, for which no class has code\n" in capsys.readouterr().out


def test_held_out_text_is_scored_with_thoughts(runs: Callable[[str], Run], corpus: Path, command: Command) -> None:
    """The anchors' next tokens are predicted by other states, all the rest as ever."""

    def evaluate(name: str, *options: str) -> subprocess.CompletedProcess[str]:
        arguments = ("--data", corpus, "--batch-size", "4", "--max-batches", "2", "--json", *options)
        return command("eval", "--model", runs(name).folder, *arguments)

    plain, thinking = (json.loads(evaluate("stage_1", *options).stdout) for options in ((), ("--thinking",)))
    assert (plain["thinking"], thinking["thinking"]) == (False, True)
    assert plain["tokens"] == thinking["tokens"] == 8 * 32
    assert 0 < abs(plain["loss"] - thinking["loss"]) < 0.2
    result = json.loads((runs("single").folder / "result.json").read_text())
    again = json.loads(evaluate("single", "--thinking", "--batch-size", "2", "--max-batches", "4").stdout)
    assert again["loss"] == pytest.approx(result["eval/email/thinking_loss"], rel=1e-5)
    refused = evaluate("multi_token_1", "--thinking")
    assert refused.returncode == 2
    assert "is no run whose objective thinks (latent_lookahead, pause, coconut)" in refused.stderr


def test_an_export_is_the_plain_model_and_a_thinker(
    runs: Callable[[str], Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a stock class, proven by reloading; the objective's tensors are beside it, and the card's lines run."""
    run, folder = runs("stage_3").folder, tmp_path / "export"
    monkeypatch.setattr(sys, "argv", ["export.py", "--model", str(run), "--output", str(folder), "--json"])
    plumbline.launcher.export.main()
    report = json.loads(capsys.readouterr().out)
    assert report["architecture"] == "Qwen3ForCausalLM"
    assert report["lookahead"]["left_out"] is None
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if "objective" in name]  # noqa: SIM118 - safe_open is no dict
    card = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    lines = "\n".join(card).replace("max_new_tokens=64", "max_new_tokens=4, temperature=1.0")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    said = subprocess.run([sys.executable, "-c", lines], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("...")
