"""The commands as users type them: a chain from text to an exported model, and one clear line for each mistake."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from plumbline.launcher.plan import check_options
from plumbline.launcher.runtime.cluster.slurm import Request
from plumbline.launcher.runtime.config.budget import ParameterCount
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.engine.memory import model_states
from plumbline.launcher.runtime.train import submission
from tests.conftest import written

if TYPE_CHECKING:
    import subprocess

    from tests.conftest import Command, Outcome, Pretrain, Start

OVERRIDES = [
    "model.vocab_size=512",
    "train.sample_prompts=['def ']",
    "metrics.trackers=[tensorboard]",
    "train.eval_batches=null",
]


@pytest.fixture(scope="module")
def trained(run_pretrain: Pretrain, tiny_config: Path) -> Path:
    """Return the folder of a finished run, by plain python."""
    outcome = run_pretrain(tiny_config, "chain", OVERRIDES, launcher="python")
    assert outcome.code == 0, outcome.stderr
    return Path(outcome.run.folder)


@pytest.fixture(scope="module")
def exported(command: Command, trained: Path) -> Path:
    output = trained.parent / "exported"
    done = command("export", "--model", trained, "--output", output, "--json")
    report = answer(done)
    assert (report["folder"], report["greedy_tokens"]) == (str(output), 31)
    assert report["relative_error"] < 1e-5
    return output


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the JSON document on standard output."""
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def the_error(done: subprocess.CompletedProcess[str] | Outcome) -> str:
    """Return the one error, after exit code 2 and without a traceback."""
    code = done.returncode if hasattr(done, "returncode") else done.code
    assert code == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: "), done.stderr
    return done.stderr.strip()


def test_the_run_folder_is_complete(trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    assert names == {
        "config.yaml", "environment.json", "metrics.jsonl", "tensorboard", "tokenizer", "checkpoints", "samples.txt",
        "result.json", "lock", "logs", "status.json", "attempts.jsonl", "chain.jsonl", "trackers", "starts.jsonl",
    }  # fmt: skip
    assert load_config(trained / "config.yaml", []).run.name == "chain"
    assert (trained / "samples.txt").read_text().startswith("=== 'def '\ndef ")
    assert json.loads((trained / "environment.json").read_text())["world_size"] == 1
    assert json.loads((trained / "result.json").read_text())["step"] == 20


def test_eval_scores_run_and_export_alike(command: Command, trained: Path, exported: Path, corpus: Path) -> None:
    result = json.loads((trained / "result.json").read_text())
    run, export = (
        answer(command("eval", "--model", model, "--data", corpus, "--sequence-length", "32", "--json"))
        for model in (trained, exported)
    )
    assert run["loss"] == pytest.approx(result["eval/email/loss"], abs=1e-5), "as the training loop measured it"
    assert export["loss"] == pytest.approx(run["loss"], abs=1e-4)
    assert export["tokens"] == run["tokens"] == result["eval/email/tokens"]
    assert run["perplexity"] == pytest.approx(math.exp(run["loss"]))
    split = json.loads((corpus / "corpus.json").read_text())["splits"]["validation"]
    assert split["tokens"] == split["source_bytes"] + split["documents"], "bytes are tokens, but for ends of text"
    in_bits = run["loss"] / math.log(2)
    assert run["bits_per_byte"] == pytest.approx(in_bits * split["tokens"] / split["source_bytes"], rel=1e-9)
    assert run["model"] == str(trained / "checkpoints" / "step_00000020")


class Touches:
    """Pickle to a call that leaves a file behind."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.file}",)


def test_a_model_on_the_hub_is_named_as_hf_name(start: Start, exported: Path, tmp_path: Path) -> None:
    """Without a network: a cache that holds the model, and one that does not."""
    snapshots = tmp_path / "models--someone--tiny" / "snapshots" / "0123"
    shutil.copytree(exported, snapshots)
    (snapshots.parent.parent / "refs").mkdir()
    (snapshots.parent.parent / "refs" / "main").write_text("0123")
    hub = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    options = ["--prompt", "def", "--max-new-tokens", "2", "--temperature", "0", "--json"]

    def generate(name: str) -> Outcome:
        words = ["--model", name, *options]
        return start("launcher/generate.py", words, tmp_path, launcher="python", fresh=True, env=hub).wait()

    there = generate("hf:someone/tiny")
    assert there.code == 0, there.stderr
    assert json.loads(there.stdout)["model"] == str(snapshots)
    missing = generate("hf:someone/other")
    assert missing.code == 2, missing.stderr
    assert missing.stderr.startswith("error: --model hf:someone/other: cannot be read: the hub cannot be reached, and")


def test_what_a_pickle_in_a_model_folder_says_is_not_done(command: Command, exported: Path, tmp_path: Path) -> None:
    strange, trace = tmp_path / "strange", tmp_path / "trace"
    shutil.copytree(exported, strange)
    (strange / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Touches(trace)}, strange / "pytorch_model.bin")
    error = the_error(command("generate", "--model", strange, "--prompt", "x", "--max-new-tokens", "2"))
    assert f"{strange}: transformers cannot load this folder" in error
    assert not trace.exists()
    assert torch.load(strange / "pytorch_model.bin", weights_only=False)
    assert trace.exists(), "whoever unpickles it runs it"


def test_export_into_an_existing_folder_is_refused(command: Command, trained: Path, exported: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in exported.iterdir()}
    error = the_error(command("export", "--model", trained, "--output", exported))
    assert f"--output {exported}: exists" in error
    assert "--overwrite" in error
    assert {path: path.stat().st_mtime_ns for path in exported.iterdir()} == before


def test_eval_refuses_a_corpus_of_another_tokenizer_before_weights_are_read(
    command: Command, trained: Path, tmp_path: Path
) -> None:
    source = Path(os.__file__).parent / "json" / "*.py"
    other = tmp_path / "other"
    done = command("prepare", "--source", source, "--tokenizer", "train-bpe:300", "--output", other)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    for weights in run.rglob("*.safetensors"):
        weights.write_bytes(b"")
    error = the_error(command("eval", "--model", run, "--data", other))
    assert f"{other}: made with another tokenizer" in error
    assert f"--tokenizer {run / 'tokenizer'}" in error


def test_a_folder_that_is_no_model_is_refused(command: Command, corpus: Path) -> None:
    error = the_error(command("eval", "--model", corpus, "--data", corpus))
    assert f"{corpus}: neither a run (checkpoints/), nor a checkpoint (manifest.json), nor a Hugging Face" in error


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["data.train=[{path: corpora/no}]"], ["corpora/no", "model.vocab_size", "prepare.py"]),
        (["data.train=[{path: corpora/no}]", "model.vocab_size=9"], ["corpora/no: no corpus here", "prepare.py"]),
        (["model.vocab_size=100"], ["model.vocab_size = 100", "email", "set 257 or more"]),
        (["model.num_attention_heads=5"], ["num_attention_heads = 5", "hidden_size = 64", "change one"]),
        (["trian.steps=1", "optimizer.lr=x"], ["did you mean train?", "optimizer.lr = 'x'", "2 problem(s)"]),
    ],
    ids=["corpus", "corpus-with-vocabulary", "vocabulary", "heads", "keys"],
)
def test_a_mistake_is_one_clear_error(
    run_pretrain: Pretrain, tiny_config: Path, overrides: list[str], parts: list[str]
) -> None:
    outcome = run_pretrain(tiny_config, "mistake", overrides, launcher="python")
    error = the_error(outcome)
    assert all(part in error for part in parts), error
    assert not outcome.run.folder.exists(), "nothing was made"


def test_a_batch_that_the_ranks_cannot_share_is_refused(run_pretrain: Pretrain, tiny_config: Path) -> None:
    """One of three ranks; it is refused before they meet."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    error = the_error(run_pretrain(tiny_config, "batch", launcher="python", env=env))
    assert "data.global_batch_size 8 is not a multiple of the world size 3; set it to 6 or 9" in error


@pytest.mark.parametrize(
    ("overrides", "nodes", "words"),
    [
        (["train.steps=30", "run.seed=2"], 2, "written by a run of other values; .* or undo:\n  run.seed: 1 -> 2"),
        (["optimizer.lr=0.5"], 1, "is complete, and was trained with other values"),
    ],
)
def test_submit_refuses_a_run_that_the_job_could_not_go_on_with(
    trained: Path, overrides: list[str], nodes: int, words: str
) -> None:
    request = Request(nodes, tasks_per_node=1)
    with pytest.raises(ValueError, match=words):
        submission.check(load_config(trained / "config.yaml", overrides), request)
    submission.check(load_config(trained / "config.yaml", ["train.steps=30", "optimizer.lr=0.5"]), Request(1, 1))


def test_a_run_tells_its_packing_and_refuses_to_repeat_text_too_often(
    run_pretrain: Pretrain, tiny_config: Path, tmp_path: Path
) -> None:
    """375 thousand tokens; the first step of 256 comes, then of 20 million."""
    env = {"PLUMBLINE_CACHE": str(tmp_path)}
    packed = ["data.packing=best_fit", "train.steps=1", "schedule.warmup=0steps", "train.eval_batches=1"]
    outcome = run_pretrain(tiny_config, "packed", packed, launcher="python", env=env)
    assert outcome.code == 0, outcome.stderr
    assert re.search(
        r"packing  email: [\d,]+ windows, \d\.\d\d% padding, \d+ of \d\d documents are longer", outcome.stdout
    )
    assert math.isfinite(outcome.run.records[0]["loss"])
    error = the_error(run_pretrain(tiny_config, "often", ["train.tokens=20_000_000"], launcher="python"))
    assert "steps read email 5" in error
    assert "set max_epochs of this source" in error


def test_a_truncated_shard_is_refused(run_pretrain: Pretrain, tiny_config: Path, corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus, tmp_path / "cut")
    size = (tmp_path / "cut" / "train.bin").stat().st_size
    os.truncate(tmp_path / "cut" / "train.bin", size - 2)
    overrides = [f"data.train=[{{path: {tmp_path / 'cut'}}}]"]
    error = the_error(run_pretrain(tiny_config, "cut", overrides, launcher="python"))
    assert f"train.bin: {size - 2} bytes, but train.idx describes {size}; the file is truncated" in error
    assert "prepare it again" in error


@pytest.fixture
def unfinished(trained: Path) -> Path:
    """Return a copy of the run that stands at its first checkpoint, beside the original."""
    copy = trained.with_name("unfinished")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(trained, copy)
    (copy / "result.json").unlink()
    shutil.rmtree(copy / "checkpoints" / "step_00000020")
    return copy


def test_the_run_folder_of_another_model_is_refused(
    run_pretrain: Pretrain, tiny_config: Path, unfinished: Path
) -> None:
    before = written(unfinished)
    overrides = [*OVERRIDES, "model.intermediate_size=160", "run.seed=3"]
    error = the_error(run_pretrain(tiny_config, "unfinished", overrides, launcher="python"))
    assert "model.intermediate_size: 96 -> 160" in error
    assert "run.seed: 1 -> 3" in error
    assert "another run.name" in error
    assert written(unfinished) == before


def test_another_corpus_in_the_same_place_is_refused(
    command: Command, run_pretrain: Pretrain, tiny_config: Path, corpus: Path, unfinished: Path
) -> None:
    """Its path is the one in the configuration; its text, and so the order of samples, is not."""
    aside = corpus.with_name("aside")
    corpus.rename(aside)
    try:
        source = Path(os.__file__).parent / "json" / "*.py"
        done = command("prepare", "--source", source, "--tokenizer", "byte", "--output", corpus)
        assert done.returncode == 0, done.stderr
        before = written(unfinished)
        error = the_error(run_pretrain(tiny_config, "unfinished", OVERRIDES, launcher="python"))
    finally:
        shutil.rmtree(corpus)
        aside.rename(corpus)
    assert "corpora: {'email': " in error
    assert written(unfinished) == before


def test_fewer_steps_than_were_made_is_refused(run_pretrain: Pretrain, tiny_config: Path, unfinished: Path) -> None:
    error = the_error(run_pretrain(tiny_config, "unfinished", [*OVERRIDES, "train.steps=5"], launcher="python"))
    assert "train.steps" in error
    assert "step 10" in error


def test_plan_says_everything_in_json(command: Command, tiny_config: Path) -> None:
    words = ["--devices", "4", "--peak-tflops", "989", "--json", "train.activation_checkpointing=full"]
    facts = answer(command("plan", "--config", tiny_config, *words))
    assert set(facts) == {
        "parameter_count", "optimizer", "sizes", "multipliers", "parameters", "flops_per_token", "memory_bytes",
        "batch", "micro_batch", "accumulation_steps", "schedule", "compute", "precision",
        "proportions", "recomputed", "cautions", "steps", "fastest",
    }  # fmt: skip
    assert facts["batch"] == "8 sequences"
    assert facts["steps"]["1"]["seconds"] == sum(
        facts["steps"]["1"][f"{part}_seconds"] for part in ("compute", "network")
    )
    assert facts["fastest"] == 0, "all fit, and stage 0 sends least"
    assert (facts["micro_batch"], facts["accumulation_steps"]) == (2, 1)
    assert facts["schedule"] == "wsd: warm-up to step 2, peak to step 16, linear decay to 0 of the peak at step 20"
    assert facts["proportions"]["tau"] == pytest.approx(1 / (4e-3 * 0.1 * 20))
    assert facts["proportions"]["warmup_share"] == 0.1
    assert any(caution.startswith("0.0") for caution in facts["cautions"])
    assert facts["sizes"] == {
        "width": 2.0, "depth": 2.0, "alpha": 1.0, "query": 2.0, "key_value": 2.0, "head_dim": 1.0, "heads": 2.0,
        "gate": 2.0, "intermediate": 2.0,
    }  # fmt: skip
    assert facts["optimizer"]["lr"] == load_config(tiny_config, []).optimizer.lr
    multipliers = {"attention": 32**-0.5, "embedding": 1.0, "residual": 0.5, "output": 0.5, "skip": 1.0}
    assert facts["multipliers"] == pytest.approx(multipliers)
    for row in facts["parameters"]:
        assert set(row) == {
            "name", "role", "shape", "init_mean", "init_std", "trainable", "lr", "lr_multiplier", "weight_decay", "eps",
            "gradient_growth",
        }  # fmt: skip
        assert row["lr"] == pytest.approx(4e-3 * row["lr_multiplier"])
    count = sum(math.prod(row["shape"]) for row in facts["parameters"])
    assert facts["parameter_count"] == {"total": count, "non_embedding": count - 2 * 257 * 64, "trained": count}
    hidden = next(row for row in facts["parameters"] if row["role"] == "hidden_matrix")
    assert (hidden["lr_multiplier"], hidden["weight_decay"]) == (0.5, 0.2)
    assert facts["compute"]["tokens"] == 20 * 8 * 32
    assert facts["compute"]["flops"] == facts["flops_per_token"] * 20 * 8 * 32
    flops = facts["compute"]["flops"] * 4 / 3  # everything is computed again, as "recomputed" below says
    assert facts["compute"]["hours"] == pytest.approx(flops / (4 * 989e12 * 0.4) / 3600)
    for memory in facts["memory_bytes"].values():
        states = sum(memory[part] for part in ("weights", "gradients", "optimizer"))
        passing = max(memory["buffers"] + memory["activations"], memory["update"])
        assert memory["total"] == pytest.approx(states + passing)
    assert set(facts["recomputed"].values()) == {"full"}


def test_the_table_has_layers_that_are_alike_in_one_row(command: Command, tiny_config: Path) -> None:
    overrides = ["model.num_hidden_layers=6", "parameterization.lr_multipliers={'.*layers.[23].mlp.*': 2}"]
    done = command("plan", "--config", tiny_config, "--parameters", *overrides)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split()[4] for line in done.stdout.splitlines()[1:] if line.count("  ") > 4}
    assert rows["model.layers.0-5.self_attn.q_proj.weight"] == rows["model.layers.0-1,4-5.mlp.up_proj.weight"]
    assert float(rows["model.layers.2-3.mlp.up_proj.weight"]) == 2 * float(
        rows["model.layers.0-1,4-5.mlp.up_proj.weight"]
    )
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} < rows.keys()
    assert len(rows) == 8 + 2 * 3 + 3, "of layers 8 tensors and twice the MLP's 3, and 3 that are in no layer"
    whole = answer(command("plan", "--config", tiny_config, "--json", *overrides))["parameters"]
    assert len(whole) == 6 * 11 + 3


COUNT = ParameterCount(total=1500, non_embedding=1200, trained=1000)
# Bytes on one of R ranks: weights, for each parameter; gradients and optimizer (master weights, two moments), for each
# that is trained
FORMULAS: dict[tuple[str, int], tuple[float, float, float]] = {
    ("bf16", 0): (4, 4, 8),  # autocast over fp32 weights: no master copy
    ("bf16", 1): (2, 4, 12 / 8),
    ("bf16", 2): (2, 4 / 8, 12 / 8),
    ("bf16", 3): (2 / 8, 4 / 8, 12 / 8),
    ("fp32", 0): (4, 4, 8),
    ("fp32", 1): (4, 4, 12 / 8),
    ("fp32", 2): (4, 4 / 8, 12 / 8),
    ("fp32", 3): (4 / 8, 4 / 8, 12 / 8),
}


@pytest.mark.parametrize(("precision", "stage"), list(FORMULAS))
def test_memory_follows_the_zero_formulas(tiny_config: Path, precision: str, stage: int) -> None:
    config = load_config(tiny_config, [f"deepspeed.precision={precision}"])
    memory = model_states(config, COUNT, stage, ranks=8, activations=0)
    weights, *trained = FORMULAS[precision, stage]
    assert memory.weights == COUNT.total * weights
    assert [memory.gradients, memory.optimizer] == [COUNT.trained * each for each in trained]


def test_offloaded_optimizer_states_leave_the_device(tiny_config: Path) -> None:
    config = load_config(tiny_config, ["deepspeed.offload_optimizer=true"])
    memory = model_states(config, COUNT, 2, ranks=8, activations=0)
    assert (memory.optimizer, memory.host) == (0.0, (12_000 + 4_000) / 8)
    memory = model_states(config, COUNT, 0, ranks=8, activations=0)
    assert (memory.optimizer, memory.host) == (8_000, 0.0), "stage 0 has nothing to offload"


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (("devices", 0), "--devices 0: must be a number above 0"),
        (("peak_tflops", math.nan), "--peak-tflops nan: must be a number above 0"),
        (("price", math.inf), "--price inf: must be a number above 0"),
        (("mfu", 50.0), "--mfu 50: is a share, at most 1: 0.5 for 50 %"),
    ],
)
def test_a_machine_that_there_is_not_is_refused(option: tuple[str, float], told: str) -> None:
    usual = {"devices": 1, "peak_tflops": 989.0, "mfu": 1.0, "device_gib": 80.0, "network_gbs": 50.0, "price": None}
    usual |= {"law": None, "parameters": False, "json": False}
    check_options(Namespace(**usual))
    with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
        check_options(Namespace(**{**usual, option[0]: option[1]}))


def test_a_device_that_does_not_hold_the_run_is_told(command: Command, tiny_config: Path) -> None:
    small = (
        "by the estimate this run does not fit a device of 0.001 GiB, of which it may take 90%, since the allocator "
        "and libraries need the rest; no ZeRO stage does: lower data.micro_batch_size, or set "
        "train.activation_checkpointing=auto"
    )
    done = command("plan", "--config", tiny_config, "--device-gib", "0.001", "--price", "5")
    assert f"warning     {small}" in done.stdout
    assert re.search(r"^time +[\d.e-]+ seconds on 1 device", done.stdout, re.MULTILINE)
    assert " 0 to 0 " not in done.stdout
    assert small in answer(command("plan", "--config", tiny_config, "--device-gib", "0.001", "--json"))["cautions"]
    fits = answer(command("plan", "--config", tiny_config, "--json"))["cautions"]
    assert not any("does not fit" in caution for caution in fits)


def test_a_plan_in_fp32_assumes_a_peak_in_fp32(command: Command, tiny_config: Path) -> None:
    """Or its time and cost would be a fifteenth; the configuration's peak and the option go before it."""

    def hours(*words: str) -> float:
        words = ("metrics.peak_tflops=null", *words)
        return float(answer(command("plan", "--config", tiny_config, "--json", *words))["compute"]["hours"])

    bf16 = hours("deepspeed.precision=bf16")
    assert hours("deepspeed.precision=fp32") == pytest.approx(bf16 * 989 / 67)
    assert hours("deepspeed.precision=fp32", "--peak-tflops", "989") == pytest.approx(bf16)
    assert hours("deepspeed.precision=fp32", "metrics.peak_tflops=494.5") == pytest.approx(2 * bf16)


def test_the_table_of_parameters_takes_no_option_that_says_nothing_there(command: Command, tiny_config: Path) -> None:
    error = the_error(command("plan", "--config", tiny_config, "--parameters", "--law", "nowhere.json"))
    assert "--parameters prints its table alone: leave out --law, or add --json" in error


def test_a_plan_for_devices_that_cannot_share_the_batch_is_refused(command: Command, tiny_config: Path) -> None:
    error = the_error(command("plan", "--config", tiny_config, "--devices", "3"))
    assert "data.global_batch_size 8 is not a multiple of the world size 3" in error
