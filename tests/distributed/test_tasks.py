"""Tasks in real training: exact match is what a plain argmax says at every ZeRO stage, a resume changes nothing."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import plumbline.launcher.eval
from plumbline.data.config import SourceConfig
from plumbline.data.loader import TrainBatches, ValidationBatches
from plumbline.data.opening import evaluated_sources, open_source
from plumbline.launcher.runtime.checkpoint.resume import check_resume
from plumbline.launcher.runtime.checkpoint.store import CheckpointError
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.models.held_out import held_out, own_task, read_task
from plumbline.launcher.runtime.models.open import load_model
from plumbline.launcher.runtime.run.inputs import open_inputs
from plumbline.launcher.runtime.scoring.scores import held_out_loss, wilson_interval
from plumbline.model.decoder import CausalLM
from plumbline.model.parameterization.multipliers import multipliers
from tests.distributed.conftest import whole_weights

if TYPE_CHECKING:
    from plumbline.launcher.runtime.ranks.world import World
    from tests.conftest import Pretrain, Run

TASK = "{name: retrieval, pairs: 4, queries: 2, keys: 6, values: 2}"
ON_TASK = [f"data.train=[{{task: {TASK}}}]", "data.sequence_length=12"]
STEPS = ["train.steps=6", "train.eval_interval=3", "train.eval_batches=3", "checkpoint.interval=3"]


@pytest.fixture(scope="module")
def task_config(tiny_config: Path) -> Config:
    return load_config(tiny_config, ON_TASK)


def test_the_vocabulary_of_the_task_is_taken(task_config: Config) -> None:
    assert task_config.model.vocab_size == 2 + 6 + 2
    assert task_config.model.max_position_embeddings == 12


@pytest.mark.parametrize(
    ("sources", "line"),
    [
        ("[{task: {name: addition, digit: 3}}]", "data.train.0.task.digit = 3: unknown key; did you mean d"),
        ("[{task: {name: retrival}}]", "data.train.0.task.name = retrival: there is none of that name; did you mean"),
        ("[{weight: 1.0, task: {name: addition, digits: 0}}]", "data.train.0.task.digits = 0: "),
        ("[{task: {name: addition}, path: x}]", "data.train.0.path = x, task = addition: give exactly one of the two"),
    ],
)  # fmt: skip
def test_a_wrong_task_is_one_clear_problem(tiny_config: Path, sources: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(tiny_config, [f"data.train={sources}"])
    problems = str(caught.value).splitlines()
    assert problems[0].endswith("1 problem(s) in the configuration")
    assert problems[1].strip().startswith(line)


def scored_by_hand(model: CausalLM, batches: list[dict[str, Any]]) -> dict[str, float]:
    """Token by token, in words."""
    nats, tokens, right, examples, exact = 0.0, 0, 0, 0, 0
    for batch in batches:
        logits = model(batch["input_ids"])
        assert isinstance(logits, Tensor)
        for row, labels in zip(logits, batch["labels"], strict=True):
            answers = [(int(row[place].argmax()), int(label)) for place, label in enumerate(labels) if label != -100]
            nats += sum(float(F.cross_entropy(row[p], labels[p])) for p in range(len(labels)) if labels[p] != -100)
            tokens += len(answers)
            right += sum(found == label for found, label in answers)
            examples += len(answers) > 0
            exact += len(answers) > 0 and all(found == label for found, label in answers)
    return {
        "loss": nats / tokens,
        "tokens": tokens,
        "examples": examples,
        "exact_match": exact / examples,
        "accuracy": right / tokens,
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_exact_match_is_what_a_plain_argmax_says(tiny_config: Path, world: World, stage: int) -> None:
    """After a few steps a model knows that answers are values, so that some examples are right and some are not."""
    config = load_config(tiny_config, [*ON_TASK, f"deepspeed.zero_stage={stage}", "optimizer.lr=0.05"])
    engine = DeepSpeedEngine(config, world)
    train = TrainBatches(config.data, config.run.seed)
    for step in range(8):
        micro_batches: list[Any] = train.micro_batches(step)
        engine.train_step(micro_batches, step, 0.05)
    split = evaluated_sources(config.data, train.corpora)["retrieval"].held_out
    batches: list[Any] = list(ValidationBatches(split, 12, 7, max_batches=3))
    for label in (batches[0]["labels"], batches[1]["labels"]):
        label[0] = -100  # a row that only pads its batch
    scores = held_out_loss(engine, batches, split)

    model = CausalLM(config.model, multipliers(config.model, config.parameterization)).eval()
    model.load_state_dict(whole_weights(engine))
    with torch.no_grad():
        expected = scored_by_hand(model, batches)
    assert 0 < expected["exact_match"] < expected["accuracy"] < 1, "the test has something to tell apart"
    assert {key: getattr(scores, key) for key in expected} == pytest.approx(expected, rel=1e-5)
    assert scores.bits_per_byte is None
    assert set(scores.metrics("x")) == {f"eval/x/{key}" for key in [*expected, "perplexity"]}


@pytest.fixture(scope="module")
def whole(run_pretrain: Pretrain, tiny_config: Path) -> Run:
    outcome = run_pretrain(tiny_config, "task", [*ON_TASK, *STEPS, "train.sample_prompts=[a]"], launcher="python")
    assert outcome.code == 0, outcome.stderr
    assert "exact match" in outcome.stdout
    return outcome.run


def test_a_resumed_run_equals_an_uninterrupted_one(whole: Run, run_pretrain: Pretrain, tiny_config: Path) -> None:
    other = whole.folder.with_name("resumed_task")
    shutil.copytree(whole.folder, other)
    (other / "result.json").unlink()
    shutil.rmtree(other / "checkpoints" / "step_00000006")
    outcome = run_pretrain(tiny_config, "resumed_task", [*ON_TASK, *STEPS], launcher="python")
    assert outcome.code == 0, outcome.stderr
    assert "resuming after step 3 from" in outcome.stdout
    assert outcome.run.numbers == whole.numbers
    assert list(whole.column("eval/retrieval/exact_match")) == [3, 6]


def test_another_task_does_not_resume(whole: Run, tiny_config: Path, world: World) -> None:
    """Its keys are compared, and so is their hash."""
    found = whole.folder / "checkpoints" / "step_00000006"
    begun = load_config(found / "config.yaml", [])
    for other in (TASK.replace("pairs: 4", "pairs: 3"), TASK.replace("}", ", seed: 1}")):
        config = load_config(tiny_config, [f"data.train=[{{task: {other}}}]", "data.sequence_length=12", *STEPS])
        with pytest.raises(CheckpointError) as caught:
            check_resume(begun, config, open_inputs(config, world).fingerprints, found)
        assert "  data.train.0.task." in str(caught.value)
        assert "corpora: {'retrieval': " in str(caught.value)
    check_resume(begun, begun, open_inputs(begun, world).fingerprints, found)


def test_two_ranks_that_shard_everything_score_the_same(whole: Run, run_pretrain: Pretrain, tiny_config: Path) -> None:
    """Three micro-batches on two ranks: one of them has only padding at last."""
    outcome = run_pretrain(tiny_config, "task_on_two", [*ON_TASK, *STEPS, "deepspeed.zero_stage=3"], ranks=2)
    assert outcome.code == 0, outcome.stderr
    one, two = whole.records[-1], outcome.run.records[-1]
    assert two["eval/retrieval/tokens"] == one["eval/retrieval/tokens"]
    assert two["eval/retrieval/loss"] == pytest.approx(one["eval/retrieval/loss"], rel=1e-4)
    for score in ("exact_match", "accuracy"):
        assert two[f"eval/retrieval/{score}"] == one[f"eval/retrieval/{score}"]


def test_eval_scores_a_run_on_its_task(
    whole: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--batch-size", "2", "--max-batches", "3", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["eval", "--model", str(whole.folder), "--task", TASK, *sizes, "--json"])
    plumbline.launcher.eval.main()
    found, result = json.loads(capsys.readouterr().out), json.loads((whole.folder / "result.json").read_text())
    assert found["data"] == "task retrieval"
    assert found["exact_match"] == result["eval/retrieval/exact_match"]
    assert found["accuracy"] == result["eval/retrieval/accuracy"]
    assert found["loss"] == pytest.approx(result["eval/retrieval/loss"], rel=1e-5)
    low, high = found["exact_match_interval"]
    assert 0 <= low < found["exact_match"] < high <= 1
    assert found["shuffled_questions"] is False
    assert (low, high) == wilson_interval(result["eval/retrieval/exact_match"] * 6, 6)
    assert found["examples"] == result["eval/retrieval/examples"] == 6

    monkeypatch.setattr(sys, "argv", ["eval", "--model", str(whole.folder), "--task", TASK, *sizes, "--shuffle-q"])
    plumbline.launcher.eval.main()
    shuffled = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shuffled["shuffled_questions"] == "True"
    assert shuffled["tokens"] == str(found["tokens"])
    assert shuffled["loss"] != f"{found['loss']:.4f}"
    assert re.fullmatch(r"\[0\.\d{4}, 0\.\d{4}\]", shuffled["exact_match_interval"])
    assert f"pairs {found['task']['pairs']}, " in shuffled["task"]


def test_choices_are_logged_on_any_number_of_ranks_and_told_by_eval(
    run_pretrain: Pretrain,
    tiny_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Train on one file with thoughts, and evaluate on another, where the deeper one is right in two of four."""
    names = ["A", "B", "c", "d", "e"]
    graph = {"idx_to_symbol": names, "edges": [[0, 2], [2, 3], [1, 4]]}
    stated, ways = "A is a c. Every c is a d. B is a e.", (["A is a c.", "Every c is a d."], ["B is a e."])
    entries = [
        {**graph, "question": f"{stated} Is {names[root]} a d or e?", "steps": ways[root]}
        | {"root": root, "target": (3, 4)[root], "neg_target": (4, 3)[root]}
        for root in (0, 1)
    ]
    files = {name: tmp_path / f"{name}.json" for name in ("train", "valid")}
    files["train"].write_text(json.dumps(entries * 8))
    files["valid"].write_text(json.dumps(entries * 2))
    tasks = {name: f"{{task: {{name: prosqa, path: {path}, answer: chain}}}}" for name, path in files.items()}
    settings = [
        *(f"data.train=[{tasks['train']}]", f"data.validation=[{tasks['valid']}]", "data.sequence_length=17"),
        *("objective.name=latent_lookahead", "objective.horizon=2", "objective.anchors=1"),
        *("objective.anchor_policy=response_start", "deepspeed.zero_stage=3"),
        *("train.steps=4", "train.eval_interval=4", "train.eval_batches=null", "checkpoint.interval=4"),
    ]
    results = []
    for ranks in (1, 2):
        outcome = run_pretrain(tiny_config, f"choices_{ranks}", settings, ranks=ranks)
        assert outcome.code == 0, outcome.stderr
        assert outcome.stdout.count("(the deeper candidate: 50.00%)") == 2, "with thoughts and without"
        results.append(json.loads((outcome.run.folder / "result.json").read_text()))
    for key in ("examples", "deeper_candidate", "answer_match", "thinking_answer_match"):
        assert results[0][f"eval/prosqa/{key}"] == results[1][f"eval/prosqa/{key}"]
    assert results[0]["eval/prosqa/examples"] == 4
    assert results[0]["eval/prosqa/deeper_candidate"] == 0.5

    run = outcome.run.folder
    monkeypatch.setattr(sys, "argv", ["eval", "--model", str(run), "--task", "prosqa", "--device", "cpu", "--json"])
    plumbline.launcher.eval.main()
    found = json.loads(capsys.readouterr().out)
    for key in ("answer_match", "deeper_candidate"):
        assert found[key] == results[1][f"eval/prosqa/{key}"]

    files["train"].write_text(json.dumps(entries * 9))
    outcome = run_pretrain(tiny_config, "choices_2", [*settings, "train.steps=6"], ranks=1)
    assert outcome.code != 0
    assert "corpora: {'prosqa': " in outcome.stderr


def test_eval_knows_the_tasks_of_a_run_by_name(
    whole: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--batch-size", "2", "--max-batches", "3", "--device", "cpu", "--json"]
    scores = []
    for task in (TASK, "retrieval"):
        monkeypatch.setattr(sys, "argv", ["eval", "--model", str(whole.folder), "--task", task, *sizes])
        plumbline.launcher.eval.main()
        scores.append(json.loads(capsys.readouterr().out))
    assert scores[0] == scores[1]
    monkeypatch.setattr(sys, "argv", ["eval", "--model", str(whole.folder), "--task", "maze", *sizes])
    with pytest.raises(ValueError, match=r"--task maze: of tasks, the run of .* has only retrieval; write others out"):
        plumbline.launcher.eval.main()
    loaded = load_model(whole.folder, torch.device("cpu"))
    assert loaded.config is not None
    other = SourceConfig.model_validate({"task": {"name": "maze"}, "name": "other"})
    data = loaded.config.data.model_copy(update={"validation": [other]})
    elsewhere = replace(loaded, config=loaded.config.model_copy(update={"data": data}))
    assert own_task(elsewhere, "other") == other
    with pytest.raises(ValueError, match="has only other"):
        own_task(elsewhere, "retrieval")
    exported = replace(loaded, config=None)  # as of a Hugging Face folder
    with pytest.raises(ValueError, match=r"--task retrieval: .* is no run, which would know it; write it out as YAML"):
        own_task(exported, "retrieval")


def test_text_has_no_questions_to_shuffle(corpus: Path) -> None:
    with pytest.raises(ValueError, match=r"--shuffle-questions: .*email is text and asks nothing; give --task"):
        held_out(open_source(SourceConfig(path=str(corpus))), shuffle_questions=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{name: retrieval, pairs: 99}", "--task: task.pairs = 99 exceeds keys = 64"),
        ("{name: retrieval", "--task {name: retrieval: cannot be read as YAML"),
        ("{name: retrieval, pairs: .nan}", "--task {name: retrieval, pairs: .nan}: 1 problem(s) in the configuration"),
        ("retrieval: 3", "--task: task = {'retrieval': 3}: a section of keys is expected, its name among them"),
    ],
)
def test_eval_refuses_what_is_no_task(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_task(text)
    assert str(caught.value).startswith(message)


def test_a_run_on_a_task_has_no_tokenizer_and_no_samples(whole: Run) -> None:
    """As one on a bare Megatron-LM pair; sample_prompts were asked for."""
    assert load_model(whole.folder, torch.device("cpu")).tokenizer_path is None
    assert not (whole.folder / "samples.txt").exists()
