"""lm-evaluation-harness on our models: likelihoods against direct sums, its own class on the export, clear refusals."""

from __future__ import annotations

import copy
import json
import math
import re
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from data.indexed import IndexedWriter
from launcher import eval as entry_point
from launcher.runtime import harness_tasks, hf_export
from launcher.runtime.harness import HarnessModel
from launcher.runtime.harness_tasks import find_tasks, score_tasks
from launcher.runtime.loading import LoadedModel, load_model, load_tokenizer
from model.decoder import CausalLM

if TYPE_CHECKING:
    from tests.conftest import Outcome, Pretrain, Start

REPOSITORY = Path(__file__).resolve().parents[2]
CONTEXT, EOS = 32, 256
# Documents of any length: within the context, a multiple of it, beyond it; bytes are no characters
DOCUMENTS = ["import os\n", "é" * (CONTEXT // 2), "def parse(text):\n    return text.strip()\n" * 3, "", "x"]
QUESTIONS = [
    {"question": "def", "choices": ["main(", "zzzzzzzzzzzz", "self"]},
    {"question": "import re\nimport", "choices": ["os", "q"]},
    {
        "question": "A question longer than what the model sees: raise",
        "choices": ["ValueError", "£", "the end"],
    },
    {"question": "", "choices": ["    return", "}", "=="]},
    {"question": "for x in", "choices": ["range(3):", "0000000000000000"]},
]
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


@pytest.fixture(scope="module")
def trained(run_pretrain: Pretrain, tiny_config: Path) -> Path:
    """The folder of a short run."""
    outcome = run_pretrain(tiny_config, "harness", ["train.steps=6", "train.eval_interval=6"], launcher="python")
    assert outcome.code == 0, outcome.stderr
    return Path(outcome.run.folder)


@pytest.fixture(scope="module")
def model(trained: Path) -> LoadedModel:
    loaded = load_model(trained, torch.device("cpu"))
    assert loaded.context_length == CONTEXT
    return loaded


@pytest.fixture(scope="module")
def writer(model: LoadedModel) -> LoadedModel:
    """The model with large random weights: what it predicts depends on all it sees, and its likeliest bytes differ."""
    module = copy.deepcopy(model.module)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=1.0 if "embed" in name else 2 * weight.size(1) ** -0.5, generator=generator)
        head = module.get_parameter("lm_head.weight")
        head[: ord("!")] = head[ord("~") :] = 0  # printable ones
    return replace(model, module=module)


@pytest.fixture(scope="module")
def exported(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """The same model as a stock class of transformers."""
    folder = tmp_path_factory.mktemp("harness") / "exported"
    hf_export.export(model, folder, "auto")
    return load_model(folder, torch.device("cpu"))


@pytest.fixture(scope="module")
def tokenizer(trained: Path) -> Any:
    return load_tokenizer(trained / "tokenizer")


@pytest.fixture(scope="module")
def likeliest(model: LoadedModel) -> list[int]:
    """Of each question, the choice with the largest log-probability, computed without the adapter."""
    return [max(range(len(found)), key=found.__getitem__) for found in (choice_nats(model, q) for q in QUESTIONS)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, likeliest: list[int]) -> Path:
    """A working directory with the data of the tasks in configs/harness, and no network."""
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


def asks(*arguments: object) -> Any:
    """A request as the harness makes it; the adapter reads its arguments only."""
    return SimpleNamespace(args=arguments)


def log_probs(model: LoadedModel, tokens: list[int]) -> Tensor:
    """[T, V]: straight from the module, one row, nothing padded."""
    with torch.no_grad():
        return model.module(torch.tensor([tokens]))[0].double().log_softmax(-1)  # type: ignore[no-any-return]


def nats_of(model: LoadedModel, context: list[int], continuation: list[int]) -> float:
    """Log-probability of a continuation, one forward pass for each of its tokens."""
    whole = (context + continuation)[-CONTEXT - 1 :]
    first = len(whole) - len(continuation)
    return sum(log_probs(model, whole[:place])[-1, whole[place]].item() for place in range(first, len(whole)))


def choice_nats(model: LoadedModel, question: dict[str, Any]) -> list[float]:
    """Log-probability of each choice; an empty question is the end of another text."""
    context = list(question["question"].encode()) or [EOS]
    return [nats_of(model, context, list(f" {choice}".encode())) for choice in question["choices"]]


def document_nats(model: LoadedModel, text: str) -> float:
    """Log-probability of a text in windows of CONTEXT predicted tokens; the last one sees as far back as it can."""
    tokens = [EOS, *text.encode()]
    total = 0.0
    for begin in range(0, len(tokens) - 1, CONTEXT):
        end = min(begin + CONTEXT, len(tokens) - 1)
        seen = max(0, end - CONTEXT)
        found = log_probs(model, tokens[seen:end])
        total += sum(found[k - seen, tokens[k + 1]].item() for k in range(begin, end))
    return total


def test_a_text_has_the_likelihood_of_its_tokens_one_by_one(writer: LoadedModel, tokenizer: Any) -> None:
    found = HarnessModel(writer, tokenizer, batch_size=3).loglikelihood_rolling([asks(text) for text in DOCUMENTS])
    assert found == pytest.approx([document_nats(writer, text) for text in DOCUMENTS], rel=1e-5)
    assert found[DOCUMENTS.index("")] == 0.0


def test_a_continuation_has_the_likelihood_of_its_tokens_one_by_one(writer: LoadedModel, tokenizer: Any) -> None:
    requests = [asks(q["question"], f" {choice}") for q in QUESTIONS for choice in q["choices"]]
    found = HarnessModel(writer, tokenizer, batch_size=4).loglikelihood(requests)
    assert [nats for nats, _ in found] == pytest.approx(
        [n for q in QUESTIONS for n in choice_nats(writer, q)], rel=1e-5
    )


def test_only_what_greedy_decoding_gives_is_greedy(writer: LoadedModel, tokenizer: Any) -> None:
    greedy = greedy_text(writer, "import", 6)
    others = [chr(ord(greedy[0]) ^ 1) + greedy[1:], greedy[:-1] + chr(ord(greedy[-1]) ^ 1)]
    found = HarnessModel(writer, tokenizer).loglikelihood([asks("import", text) for text in (greedy, *others)])
    assert [exact for _, exact in found] == [True, False, False]


def test_a_context_that_is_all_spaces_is_the_end_of_another_text(writer: LoadedModel, tokenizer: Any) -> None:
    """lm_eval gives them to the continuation, and nothing is left to predict its first token from."""
    ((nats, _),) = HarnessModel(writer, tokenizer).loglikelihood([asks(" ", "x")])
    assert nats == pytest.approx(nats_of(writer, [EOS], list(b" x")), rel=1e-5)


def test_what_is_too_long_loses_its_beginning(writer: LoadedModel, tokenizer: Any) -> None:
    text, answer = "a long beginning " * 4, " and its end"
    seen = text[-(CONTEXT + 1 - len(answer)) :]
    adapter = HarnessModel(writer, tokenizer)
    # The last space of a context goes to the continuation
    found = adapter.loglikelihood([asks(text.rstrip(), answer), asks(text.rstrip()[-len(seen) :], answer)])
    assert found[0] == found[1]
    assert found[0][0] == pytest.approx(nats_of(writer, list(text.rstrip().encode()), list(answer.encode())), rel=1e-5)
    assert adapter.loglikelihood([asks("x" * 40, "y" * CONTEXT)])[0][0] < 0
    with pytest.raises(ValueError, match=r"a continuation of 33 tokens does not fit .* which sees 32"):
        adapter.loglikelihood([asks("x", "y" * (CONTEXT + 1))])


def test_batches_change_nothing(writer: LoadedModel, tokenizer: Any) -> None:
    documents = [asks(text) for text in DOCUMENTS]
    choices = [asks(q["question"], f" {choice}") for q in QUESTIONS for choice in q["choices"]]
    alone, together = (HarnessModel(writer, tokenizer, batch_size) for batch_size in (1, 64))
    assert together.loglikelihood_rolling(documents) == pytest.approx(alone.loglikelihood_rolling(documents), rel=1e-5)
    ones, many = alone.loglikelihood(choices), together.loglikelihood(choices)
    assert [nats for nats, _ in many] == pytest.approx([nats for nats, _ in ones], rel=1e-5)
    assert [exact for _, exact in many] == [exact for _, exact in ones]


def test_a_text_is_one_document(writer: LoadedModel, tokenizer: Any) -> None:
    """Where the model masks documents, and counts positions from their beginnings, as where it does not."""
    plain = writer.module
    assert isinstance(plain, CausalLM)
    masked = CausalLM(plain.config.model_copy(update={"document_mask": True}), plain.multipliers)
    masked.load_state_dict(plain.state_dict())
    requests = [asks(text) for text in DOCUMENTS]
    found = HarnessModel(replace(writer, module=masked.eval()), tokenizer).loglikelihood_rolling(requests)
    assert found == pytest.approx(HarnessModel(writer, tokenizer).loglikelihood_rolling(requests), rel=1e-5)


def greedy_text(model: LoadedModel, prompt: str, count: int) -> str:
    """The likeliest byte, again and again; each from a fresh forward pass."""
    tokens = list(prompt.encode())
    for _ in range(count):
        tokens.append(int(log_probs(model, tokens)[-1].argmax()))
    return bytes(tokens[-count:]).decode()


def test_generation_stops_before_the_first_string(writer: LoadedModel, tokenizer: Any) -> None:
    whole = greedy_text(writer, "def ", 12)
    early, late = whole[2:4], whole[5:7]
    assert 0 < whole.index(early) < whole.index(late), whole
    overlapping = [whole[3:5], whole[2:5]]  # the same token completes both
    until = [[], late, [late, early], overlapping, ["", "never this"], None]
    requests = [asks("def ", {"until": strings, "max_gen_toks": 12}) for strings in until]
    cut = [whole, whole[: whole.index(late)], whole[: whole.index(early)], whole[:2], whole, whole]
    assert HarnessModel(writer, tokenizer).generate_until(requests) == cut


def test_generation_sees_the_end_of_a_long_text(writer: LoadedModel, tokenizer: Any) -> None:
    text = "".join(map(chr, range(48, 112)))
    (found,) = HarnessModel(writer, tokenizer).generate_until([asks(text, {"until": [], "max_gen_toks": 5})])
    assert found == greedy_text(writer, text[-(CONTEXT - 5) :], 5)


def test_generation_after_nothing_begins_a_text(writer: LoadedModel, tokenizer: Any) -> None:
    (found,) = HarnessModel(writer, tokenizer).generate_until([asks("", {"until": [], "max_gen_toks": 1})])
    assert found == chr(int(log_probs(writer, [EOS])[-1].argmax()))


def test_generation_ends_with_the_text(writer: LoadedModel, tokenizer: Any) -> None:
    """Of a model that ends the text where the other writes its third byte."""
    whole = greedy_text(writer, "def ", 6)
    assert whole[2] not in whole[:2]
    module = copy.deepcopy(writer.module)
    with torch.no_grad():
        head = module.get_parameter("lm_head.weight")
        head[EOS] = head[ord(whole[2])]
        head[ord(whole[2])] = 0
    requests = [asks("def ", {"until": ["\0"], "max_gen_toks": 6})]
    assert HarnessModel(replace(writer, module=module), tokenizer).generate_until(requests) == [whole[:2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_sample": True, "temperature": 0.7, "max_gen_toks": 4}, "only greedy decoding"),
        ({"until": ["\n"]}, r"max_gen_toks 256 leaves no room for a context: .* sees 32 tokens"),
    ],
)
def test_generation_that_cannot_be_is_refused(
    model: LoadedModel, tokenizer: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        HarnessModel(model, tokenizer).generate_until([asks("def ", options)])


def test_what_a_tokenizer_puts_before_a_text_is_there_once(model: LoadedModel, trained: Path) -> None:
    tokenizer = load_tokenizer(trained / "tokenizer")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.eos_token} $A", special_tokens=[(tokenizer.eos_token, EOS)]
    )
    adapter = HarnessModel(model, tokenizer)
    assert adapter.tok_encode("x") == adapter.tok_encode("<|endoftext|>x") == [EOS, ord("x")]
    assert adapter.tok_encode("x", add_special_tokens=False) == [ord("x")]


def test_a_tokenizer_without_ends_is_refused(model: LoadedModel) -> None:
    with pytest.raises(ValueError, match=r"neither bos_token nor eos_token.*set eos_token in tokenizer_config"):
        HarnessModel(model, SimpleNamespace(bos_token_id=None, eos_token_id=None))
    assert HarnessModel(model, SimpleNamespace(bos_token_id=None, eos_token_id=0)).prefix_token_id == 0
    assert HarnessModel(model, SimpleNamespace(bos_token_id=0, eos_token_id=1)).prefix_token_id == 0


def numbers(values: dict[str, Any]) -> dict[str, float]:
    """Of a task's results, without "N/A" and names."""
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
        per_byte = [n / len(c.encode()) for n, c in zip(choice_nats(model, question), question["choices"], strict=True)]
        normed.append(per_byte.index(max(per_byte)) == right)
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


def test_examples_and_a_limit_are_taken_over(model: LoadedModel, tokenizer: Any, place: Path) -> None:
    plain = score_tasks(model, tokenizer, find_tasks(["choices"], both_folders(place)), limit=3)
    shown = score_tasks(model, tokenizer, find_tasks(["choices"], both_folders(place)), limit=3, num_fewshot=2)
    assert plain["n-samples"]["choices"]["effective"] == 3
    assert plain["results"]["choices"]["acc,none"] == 1.0, "the wrong key is the last one's"
    assert (plain["n-shot"]["choices"], shown["n-shot"]["choices"]) == (0, 2)


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
    """Run eval.py in a process of its own, in which every `sitecustomize` says what is missing."""

    def run(*arguments: str | Path, sitecustomize: str = NO_NETWORK) -> Outcome:
        (place / "hooks").mkdir(exist_ok=True)
        (place / "hooks" / "sitecustomize.py").write_text(sitecustomize, encoding="utf-8")
        env = {
            "PYTHONPATH": f"{place / 'hooks'}:{REPOSITORY}",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(place / "home"),
        }
        return start("launcher/eval.py", arguments, place, launcher="python", env=env).wait()

    return run


def local_task(place: Path, name: str, data: Path) -> Path:
    """A folder with the repository's held-out task under another name, over another file."""
    folder = place / name
    folder.mkdir()
    text = (REPOSITORY / "configs" / "harness" / "held_out.yaml").read_text(encoding="utf-8")
    text = text.replace("task: held_out", f"task: {name}").replace("corpora/held_out.jsonl", str(data))
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


def test_the_same_text_has_the_same_bits_by_data_and_by_tasks(
    evaluate: Evaluate,
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
    monkeypatch.setattr(sys, "argv", ["eval.py", "--model", str(trained), "--data", str(place / "text"), "--json"])
    entry_point.main()
    by_data = json.loads(capsys.readouterr().out)
    by_tasks = evaluate("--model", trained, "--tasks", "mine_too", "--task-folder", folder, "--json")
    assert by_tasks.code == 0, by_tasks.stderr
    told = json.loads(by_tasks.stdout)
    bits = told["results"]["mine_too"]["bits_per_byte,none"]
    assert bits == pytest.approx(by_data["loss"] / math.log(2), rel=1e-6)
    assert told["model"] == str(trained / "checkpoints" / "step_00000006")
    assert told["lm_eval"].startswith("0.4.")
    assert (told["versions"], told["n-shot"], told["limit"]) == ({"mine_too": 1.0}, {"mine_too": 0}, None)


def test_a_line_for_each_metric(
    trained: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [word for folder in both_folders(place) for word in ("--task-folder", str(folder))]
    arguments = ["--model", str(trained), "--tasks", "choices,continue", *folders, "--limit", "2"]
    monkeypatch.setattr(sys, "argv", ["eval.py", *arguments])
    entry_point.main()
    lines = [re.sub(" +", " ", line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith(f"{trained / 'checkpoints' / 'step_00000006'}, lm_eval 0.4.")
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


def test_without_lm_eval_one_line_says_what_to_install(evaluate: Evaluate, trained: Path) -> None:
    absent = "import sys\nsys.modules['lm_eval'] = None\n"
    outcome = evaluate("--model", trained, "--tasks", "hellaswag", sitecustomize=absent)
    assert outcome.code == 2
    assert outcome.stderr.startswith("error: --tasks needs lm-evaluation-harness (")
    assert outcome.stderr.endswith("): pip install 'plumbline[tasks]'\n")
    assert outcome.stderr.count("\n") == 1


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
    ("data", "split", "message"),
    [
        (None, "test", "FileNotFoundError"),
        ('{"text": "x"}\nno JSON\n', "test", r"DatasetGenerationError: [^:]+: \w+: "),  # and why
        ('{"text": "x"}\n', "exam", "KeyError: 'exam'"),
    ],
)
def test_a_task_that_cannot_be_loaded_is_named(place: Path, data: str | None, split: str, message: str) -> None:
    file = place / "data.jsonl"
    if data is not None:
        file.write_text(data, encoding="utf-8")
    folder = local_task(place, "broken", file)
    yaml = folder / "broken.yaml"
    yaml.write_text(yaml.read_text().replace("test_split: test", f"test_split: {split}"), encoding="utf-8")
    with pytest.raises(ValueError, match="--tasks broken: lm_eval cannot load it: ") as told:
        find_tasks(["broken"], [folder])
    assert re.search(message, str(told.value))
    assert "data_files are relative to the working directory" in str(told.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "x", "--thinking"], "--thinking does not go with --tasks: leave it out, or give --data or --task"),
        (["--tasks", "x", "--shuffle-questions"], "--shuffle-questions does not go with --tasks"),
        (["--tasks", "x", "--sequence-length", "8"], "--sequence-length does not go with --tasks"),
        (["--tasks", "x", "--max-batches", "8"], "--max-batches does not go with --tasks"),
        (["--data", "x", "--task-folder", "y"], "--task-folder does not go with --data or --task: .* give --tasks"),
        (["--data", "x", "--num-fewshot", "0"], "--num-fewshot does not go with --data"),
        (["--task", "{}", "--limit", "3"], "--limit does not go with --data or --task"),
        (["--data", "x", "--bootstrap", "9"], "--bootstrap does not go with --data or --task"),
        (["--tasks", "x", "--num-fewshot", "-1"], "--num-fewshot -1: 0 is none"),
    ],
    ids=lambda value: value[-1] if isinstance(value, str) else " ".join(value),
)
def test_options_of_another_score_are_refused(
    monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["eval.py", "--model", "nothing/here", *options])
    with pytest.raises(ValueError, match=message):
        entry_point.main()


@pytest.mark.parametrize("other", ["--data", "--task"])
def test_one_thing_is_scored(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], other: str) -> None:
    monkeypatch.setattr(sys, "argv", ["eval.py", "--model", "nothing/here", "--tasks", "x", other, "y"])
    with pytest.raises(SystemExit, match="2"):
        entry_point.main()
    assert f"argument {other}: not allowed with argument --tasks" in capsys.readouterr().err


def test_a_model_without_tokenizer_is_refused(monkeypatch: pytest.MonkeyPatch, model: LoadedModel, place: Path) -> None:
    monkeypatch.setattr(entry_point, "load_model", lambda *_: replace(model, tokenizer_path=None))
    arguments = ["--model", "x", "--tasks", "continue", "--task-folder", str(place / "mine")]
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
