"""Tasks of lm-evaluation-harness, without a network: what they score, its own class on the export, clear refusals."""

from __future__ import annotations

import json
import math
import re
import socket
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from plumbline.data.indexed import IndexedWriter
from plumbline.launcher import eval as entry_point
from plumbline.launcher.runtime.commands import cli
from plumbline.launcher.runtime.harness import tasks as harness_tasks
from plumbline.launcher.runtime.harness.adapter import HarnessModel
from plumbline.launcher.runtime.harness.tasks import find_tasks, score_tasks
from plumbline.launcher.runtime.models.open import LoadedModel
from plumbline.launcher.runtime.quantize.save import save_quantized
from plumbline.model.quantization.post_training.apply import quantize_model
from plumbline.model.quantization.post_training.recipes import recipes
from tests.launcher.runtime.conftest import CONTEXT, DOCUMENTS, EOS, QUESTIONS, asks, choice_nats, document_nats

if TYPE_CHECKING:
    from tests.conftest import Outcome, Start

REPOSITORY = Path(__file__).resolve().parents[4]
CONTINUE = """\
task: continue
dataset_path: json
dataset_kwargs: {data_files: {test: corpora/held_out.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: ""
generation_kwargs: {max_gen_toks: 9, until: ["\\n\\n"]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
# Imported by every Python that finds it: whoever asks the network is told that there is none
NO_NETWORK = """\
import socket
def refuse(*arguments, **options):
    raise OSError("no network here")
socket.socket.connect = socket.getaddrinfo = refuse
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, likeliest: list[int]) -> Path:
    """Return a working directory with the data of the tasks in configs/harness, and no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    (tmp_path / "corpora").mkdir()
    write_lines(tmp_path / "corpora" / "held_out.jsonl", [{"text": text} for text in DOCUMENTS])
    # The last question has a wrong key: what is likelier is not the answer
    answers = [*likeliest[:-1], 1 - likeliest[-1]]
    rows = [{**question, "answer": answer} for question, answer in zip(QUESTIONS, answers, strict=True)]
    write_lines(tmp_path / "corpora" / "choices.jsonl", rows)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "continue.yaml").write_text(CONTINUE, encoding="utf-8")
    return tmp_path


def refuse(*arguments: object, **options: object) -> None:
    raise OSError("no network here")


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def numbers(values: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a task's results, without "N/A" and names."""
    return {key: value for key, value in values.items() if not isinstance(value, str)}


def both_folders(place: Path) -> list[Path]:
    return [REPOSITORY / "configs" / "harness", place / "mine"]


def test_the_tasks_of_the_repository_score_what_they_say(
    model: LoadedModel, tokenizer: Any, likeliest: list[int], place: Path
) -> None:
    names = sorted(path.stem for path in (REPOSITORY / "configs" / "harness").iterdir())
    assert names == ["choices", "held_out"]
    scores = score_tasks(model, tokenizer, find_tasks(names, both_folders(place)), batch_size=5)
    nats = sum(document_nats(model, text) for text in DOCUMENTS)
    count = sum(len(text.encode()) for text in DOCUMENTS)
    held_out = scores["results"]["held_out"]
    assert held_out["bits_per_byte,none"] == pytest.approx(-nats / count / math.log(2), rel=1e-5)
    assert held_out["byte_perplexity,none"] == pytest.approx(math.exp(-nats / count), rel=1e-5)
    choices = scores["results"]["choices"]
    assert choices["acc,none"] == 0.8, "all but the one with the wrong key"
    normed = []
    for question, right in zip(QUESTIONS, [*likeliest[:-1], 1 - likeliest[-1]], strict=True):
        per_character = [n / len(c) for n, c in zip(choice_nats(model, question), question["choices"], strict=True)]
        normed.append(per_character.index(max(per_character)) == right)
    assert choices["acc_norm,none"] == pytest.approx(sum(normed) / len(normed))
    assert set(choices.values()) >= {"N/A"}, "no standard errors unless asked for"
    assert scores["n-samples"] == {
        "held_out": {"original": 5, "effective": 5}, "choices": {"original": 5, "effective": 5},
    }  # fmt: skip
    assert scores["n-shot"] == {"held_out": 0, "choices": 0}


def test_bootstrap_asks_for_standard_errors(model: LoadedModel, tokenizer: Any, place: Path) -> None:
    tasks = find_tasks(["choices"], both_folders(place))
    scores = score_tasks(model, tokenizer, tasks, bootstrap=10)
    error = math.sqrt(0.8 * 0.2 / 4)  # of a mean of five, by formula
    assert scores["results"]["choices"]["acc_stderr,none"] == pytest.approx(error)
    line = next(harness_tasks.lines(scores))
    assert line.split() == ["choices", "acc", "0.8000", "±", f"{error:.4f}", "n", "5,", "0-shot"]


def test_a_perplexity_that_overflows_is_one_error(model: LoadedModel, tokenizer: Any, place: Path) -> None:
    """Of text without spaces, the word is the whole text."""
    write_lines(place / "corpora" / "held_out.jsonl", [{"text": "語" * 400}])
    tasks = find_tasks(["held_out"], both_folders(place))
    with pytest.raises(ValueError, match="leave word_perplexity out of the task's metric_list"):
        score_tasks(model, tokenizer, tasks)


def test_examples_and_a_limit_are_taken_over(model: LoadedModel, tokenizer: Any, place: Path) -> None:
    plain = score_tasks(model, tokenizer, find_tasks(["choices"], both_folders(place)), limit=3)
    shown = score_tasks(model, tokenizer, find_tasks(["choices"], both_folders(place)), limit=3, num_fewshot=2)
    assert plain["n-samples"]["choices"]["effective"] == 3
    assert plain["results"]["choices"]["acc,none"] == 1.0, "the wrong key is the last one's"
    assert (plain["n-shot"]["choices"], shown["n-shot"]["choices"]) == (0, 2)


def test_a_text_that_is_scored_whole_has_no_examples(model: LoadedModel, tokenizer: Any, place: Path) -> None:
    scores = score_tasks(model, tokenizer, find_tasks(["held_out"], both_folders(place)), limit=1, num_fewshot=2)
    assert next(harness_tasks.lines(scores)).endswith(", 0-shot")


def test_a_run_and_its_export_agree(model: LoadedModel, exported: LoadedModel, tokenizer: Any, place: Path) -> None:
    names = ["held_out", "choices", "continue"]
    ours, stock = (
        score_tasks(scored, tokenizer, find_tasks(names, both_folders(place)))["results"]
        for scored in (model, exported)
    )
    assert type(exported.module) is not type(model.module)
    prompts = [asks(text, {"until": ["\n"], "max_gen_toks": 9}) for text in ("def ", "import os\nimport ", "x" * 60)]
    assert HarnessModel(exported, tokenizer).generate_until(prompts) == HarnessModel(model, tokenizer).generate_until(
        prompts
    )
    for name in names:
        assert numbers(ours[name]) == pytest.approx(numbers(stock[name]), rel=1e-5), name


def test_the_class_of_lm_eval_gives_the_same_numbers(
    model: LoadedModel, exported: LoadedModel, tokenizer: Any, place: Path
) -> None:
    pytest.importorskip("accelerate", reason="lm_eval's own class needs it: pip install accelerate")
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    texts = [asks(text) for text in DOCUMENTS]
    pairs = [asks(q["question"], f" {choice}") for q in QUESTIONS for choice in q["choices"]]
    prompts = [asks(text, {"until": ["e", "\n"], "max_gen_toks": 9}) for text in ("def ", "import ", "x" * 60)]
    theirs, ours = HFLM(pretrained=exported.module, tokenizer=tokenizer, device="cpu"), HarnessModel(model, tokenizer)
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), rel=1e-5)
    assert [nats for nats, _ in ours.loglikelihood(pairs)] == pytest.approx(
        [nats for nats, _ in theirs.loglikelihood(pairs)], rel=1e-5
    )
    assert ours.generate_until(prompts) == [theirs.generate_until([prompt])[0] for prompt in prompts]
    names = ["held_out", "choices"]
    tasks = find_tasks(names, both_folders(place))
    results = simple_evaluate(theirs, tasks=tasks.loaded, task_manager=tasks.manager, bootstrap_iters=0)["results"]
    scores = score_tasks(model, tokenizer, find_tasks(names, both_folders(place)))["results"]
    for name in names:
        assert numbers(scores[name]) == pytest.approx(numbers(results[name]), rel=1e-5), name


Evaluate = Callable[..., "Outcome"]


@pytest.fixture
def evaluate(start: Start, place: Path) -> Evaluate:
    """Run eval.py in a process of its own, in which there is no network."""

    def run(*arguments: str | Path) -> Outcome:
        (place / "hooks").mkdir(exist_ok=True)
        (place / "hooks" / "sitecustomize.py").write_text(NO_NETWORK, encoding="utf-8")
        env = {
            "PYTHONPATH": str(place / "hooks"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(place / "home"),
        }
        return start("launcher/eval.py", arguments, place, launcher="python", env=env, fresh=True).wait()

    return run


def local_task(place: Path, name: str, data: Path) -> Path:
    """Return a folder with the repository's held-out task under another name, over another file."""
    folder = place / name
    folder.mkdir()
    text = (REPOSITORY / "configs" / "harness" / "held_out.yaml").read_text(encoding="utf-8")
    text = text.replace("task: held_out", f"task: {name}").replace("corpora/held_out.jsonl", str(data))
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


def scored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path, *arguments: str | Path
) -> dict[str, Any]:
    """Return what eval.py prints with --json, in this process."""
    monkeypatch.setattr(sys, "argv", ["eval.py", "--model", str(model), *map(str, arguments), "--json"])
    entry_point.main()
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_same_text_has_the_same_bits_by_data_and_by_tasks(
    trained: Path,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A multiple of the context, so that the last window is like the others; after an end of text, as in lm_eval."""
    text = ("é, " + DOCUMENTS[2])[: 2 * CONTEXT - 1]
    tokens = list(text.encode())
    assert len(tokens) == 2 * CONTEXT
    with IndexedWriter(place / "text", np.dtype("<u2")) as writer:
        writer.add_documents(np.array([EOS, *tokens]), [1, len(tokens)])
    write_lines(place / "text.jsonl", [{"text": text}])
    folder = local_task(place, "mine_too", place / "text.jsonl")
    by_data, told = (
        scored(monkeypatch, capsys, trained, *words)
        for words in (("--data", place / "text"), ("--tasks", "mine_too", "--task-folder", folder))
    )
    bits = told["results"]["mine_too"]["bits_per_byte,none"]
    assert bits == pytest.approx(by_data["loss"] / math.log(2), rel=1e-6)
    assert told["model"] == str(trained / "checkpoints" / "step_00000020")
    assert told["lm_eval"].startswith("0.4.")
    assert (told["versions"], told["n-shot"], told["limit"]) == ({"mine_too": 1.0}, {"mine_too": 0}, None)


def test_a_quantized_folder_is_scored_as_what_was_quantized(
    evaluate: Evaluate, model: LoadedModel, tokenizer: Any, place: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    (recipe,) = recipes(["rtn-w3"])
    rounded, copied = (replace(model, module=deepcopy(model.module)) for _ in range(2))
    save_quantized(copied, recipe, (), place / "saved")
    quantize_model(rounded.module, recipe)
    folder = local_task(place, "text", place / "corpora" / "held_out.jsonl")
    found = score_tasks(rounded, tokenizer, find_tasks(["text"], [folder]))["results"]["text"]
    outcome = evaluate("--model", place / "saved", "--tasks", "text", "--task-folder", folder, "--json")
    assert outcome.code == 0, outcome.stderr
    told = json.loads(outcome.stdout)["results"]["text"]
    assert told["bits_per_byte,none"] == pytest.approx(found["bits_per_byte,none"], rel=1e-5)
    plain = score_tasks(model, tokenizer, find_tasks(["text"], [folder]))["results"]["text"]
    assert abs(told["bits_per_byte,none"] / plain["bits_per_byte,none"] - 1) > 1e-4
    noise = [line for line in outcome.stderr.splitlines() if "model:" in line or "torchao" in line or "Enum" in line]
    assert not noise, "libraries that unpack the weights keep their bars and warnings to themselves"


def test_a_line_for_each_metric(
    trained: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [word for folder in both_folders(place) for word in ("--task-folder", str(folder))]
    arguments = ["--model", str(trained), "--tasks", "choices, continue ", *folders, "--limit", "2"]
    monkeypatch.setattr(sys, "argv", ["eval.py", *arguments])
    entry_point.main()
    lines = [re.sub(" +", " ", line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith(f"{trained / 'checkpoints' / 'step_00000020'}, lm_eval 0.4.")
    assert lines[1] == "choices acc 1.0000 n 2, 0-shot"
    assert [line.split()[:2] for line in lines[2:4]] == [["choices", "acc_norm"], ["continue", "exact_match"]]
    assert lines[4:] == ["no standard errors: ask for them with --bootstrap 1000"]


def test_lines_of_filters_and_groups() -> None:
    """A group that averages nothing has no metric and no documents of its own."""
    task = {"name": "sums", "sample_len": 7, "exact_match,strict": 0.5, "exact_match_stderr,strict": "N/A"}
    mean = {"name": "mean", "sample_len": 9, "acc,none": 0.25, "acc_stderr,none": 0.125}
    scores = {"results": {"sums": task, "none": {"name": "none"}, "mean": mean}, "n-shot": {"sums": 5}}
    assert [re.sub(" +", " ", line) for line in harness_tasks.lines(scores)] == [
        "sums exact_match (strict) 0.5000 n 7, 5-shot",
        "mean acc 0.2500 ± 0.1250 n 9",
    ]


def test_without_lm_eval_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trained: Path
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr(sys, "argv", ["eval.py", "--model", str(trained), "--tasks", "hellaswag"])
    with pytest.raises(SystemExit, match="2"):
        cli.run(entry_point.main)
    error = capsys.readouterr().err
    assert error.startswith("error: --tasks needs lm-evaluation-harness (")
    assert error.endswith("): pip install -e '.[tasks]'\n")
    assert error.count("\n") == 1


def test_an_unknown_task_is_told_its_neighbours(place: Path) -> None:
    with pytest.raises(ValueError, match="--tasks hellaswga: not among lm_eval's own tasks and") as told:
        find_tasks(["choices", "hellaswga"], both_folders(place))
    assert re.search(r"near names: .*\bhellaswag\b", str(told.value))
    assert "a file NAME.yaml with `task: hellaswga` under a --task-folder" in str(told.value)
    assert str(place / "mine") in str(told.value)


def test_a_folder_that_is_not_there_is_refused(place: Path) -> None:
    with pytest.raises(ValueError, match="--task-folder no/where: no such folder"):
        find_tasks(["choices"], [Path("no/where")])


def test_a_task_whose_data_is_on_the_hub_says_so(evaluate: Evaluate, trained: Path, place: Path) -> None:
    (place / "mine" / "far.yaml").write_text(
        CONTINUE.replace("task: continue", "task: far")
        .replace("dataset_path: json", "dataset_path: nobody/nothing")
        .replace("dataset_kwargs: {data_files: {test: corpora/held_out.jsonl}}\n", ""),
        encoding="utf-8",
    )
    outcome = evaluate("--model", trained, "--tasks", "far", "--task-folder", place / "mine")
    assert outcome.code == 2, outcome.stderr
    error = outcome.stderr.splitlines()[-1]
    assert error.startswith("error: --tasks far: its data is on the Hugging Face hub, which cannot be reached (")
    assert "Couldn't reach 'nobody/nothing'" in error
    assert "fills the datasets cache" in error
    assert "local data_files" in error
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "FileNotFoundError"),
        ('{"text": "x"}\nno JSON\n', r"DatasetGenerationError: [^:]+: \w+: "),  # and why
    ],
)
def test_a_task_that_cannot_be_loaded_is_named(place: Path, data: str | None, message: str) -> None:
    file = place / "data.jsonl"
    if data is not None:
        file.write_text(data, encoding="utf-8")
    folder = local_task(place, "broken", file)
    with pytest.raises(ValueError, match="--tasks broken: lm_eval cannot load it: ") as told:
        find_tasks(["broken"], [folder])
    assert re.search(message, str(told.value))
    assert "data_files are relative to the working directory" in str(told.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--tasks", "x", "--thinking"],
            "--thinking does not go with --tasks: leave it out, or give --data, --text or --task",
        ),
        (["--tasks", "x", "--shuffle-questions"], "--shuffle-questions does not go with --tasks"),
        (["--tasks", "x", "--sequence-length", "8"], "--sequence-length does not go with --tasks"),
        (["--tasks", "x", "--max-batches", "8"], "--max-batches does not go with --tasks"),
        (
            ["--data", "x", "--task-folder", "."],
            "--task-folder does not go with --data, --text or --task: .* give --tasks",
        ),
        (["--data", "x", "--num-fewshot", "0"], "--num-fewshot does not go with --data"),
        (["--task", "{}", "--limit", "3"], "--limit does not go with --data, --text or --task"),
        (["--data", "x", "--bootstrap", "9"], "--bootstrap does not go with --data, --text or --task"),
        (["--tasks", "x", "--num-fewshot", "-1"], "--num-fewshot -1: 0 is none"),
    ],
    ids=lambda value: value[-1] if isinstance(value, str) else " ".join(value),
)
def test_options_of_another_score_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["eval.py", "--model", ".", *options])
    with pytest.raises(SystemExit, match="2"):
        entry_point.main()
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("other", ["--data", "--task"])
def test_one_thing_is_scored(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], other: str) -> None:
    monkeypatch.setattr(sys, "argv", ["eval.py", "--model", ".", "--tasks", "x", other, "y"])
    with pytest.raises(SystemExit, match="2"):
        entry_point.main()
    assert f"argument {other}: not allowed with argument --tasks" in capsys.readouterr().err


def test_a_model_without_tokenizer_is_refused(monkeypatch: pytest.MonkeyPatch, model: LoadedModel, place: Path) -> None:
    monkeypatch.setattr(entry_point, "load_model", lambda *_: replace(model, tokenizer_path=None))
    arguments = ["--model", ".", "--tasks", "continue", "--task-folder", str(place / "mine")]
    monkeypatch.setattr(sys, "argv", ["eval.py", *arguments])
    with pytest.raises(ValueError, match="has no tokenizer, so the text of --tasks cannot be turned into tokens"):
        entry_point.main()


def test_the_documented_way_makes_a_file_of_the_held_out_text(place: Path, corpus: Path) -> None:
    """The lines of docs/harness.md, as they stand there; the corpus lies where they look."""
    (place / "corpora" / "stdlib").symlink_to(corpus)
    code = re.search(r"```python\n(.*?)```", (REPOSITORY / "docs" / "harness.md").read_text(encoding="utf-8"), re.S)
    assert code is not None
    exec(compile(code[1], "docs/harness.md", "exec"), {})
    rows = [json.loads(line) for line in (place / "corpora" / "held_out.jsonl").read_text().splitlines()]
    counts = json.loads((corpus / "corpus.json").read_text())["splits"]["validation"]
    assert len(rows) == counts["documents"]
    assert sum(len(row["text"].encode()) for row in rows) == counts["source_bytes"]
