"""generate.py and eval.py --text as users type them: many prompts, typed ones, plain text, mistakes."""

from __future__ import annotations

import json
import re
import shutil
import sys
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import plumbline.launcher.eval
import plumbline.launcher.generate
from plumbline.launcher.runtime.models.continuing import check_rounding, usual_length
from plumbline.model.build import build_decoder
from plumbline.model.config import ModelConfig
from plumbline.model.quantization.precision import PrecisionConfig, apply_precision
from tests.conftest import REPOSITORY
from tests.launcher.test_cli import answer, the_error

if TYPE_CHECKING:
    from tests.conftest import Command, Pretrain


@pytest.fixture(scope="module")
def trained(run_pretrain: Pretrain, tiny_config: Path) -> Path:
    """Return the folder of a finished run."""
    outcome = run_pretrain(tiny_config, "asked", ["train.eval_interval=20"], launcher="python")
    assert outcome.code == 0, outcome.stderr
    return Path(outcome.run.folder)


@pytest.fixture(scope="module")
def exported(command: Command, trained: Path) -> Path:
    answer(command("export", "--model", trained, "--output", trained.parent / "asked-export", "--json"))
    return trained.parent / "asked-export"


def test_generate_is_a_function_of_its_seed(command: Command, trained: Path) -> None:
    options = ("--model", trained, "--prompt", "def ", "--max-new-tokens", "20", "--samples", "2", "--json")
    first, again, other = (answer(command("generate", *options, "--seed", seed)) for seed in ("1", "1", "5"))
    speed = first.pop("speed")
    assert speed["new_tokens"] == sum(len(sample["tokens"]) for sample in first["samples"])
    assert first == {key: value for key, value in again.items() if key != "speed"}
    assert first["samples"] != other["samples"]
    assert first["samples"][0] != first["samples"][1]
    assert all(1 <= len(sample["tokens"]) <= 20 for sample in first["samples"])


def test_greedy_generation_agrees_with_the_export(command: Command, trained: Path, exported: Path) -> None:
    options = ("--prompt", "import ", "--max-new-tokens", "12", "--temperature", "0", "--json")
    run, export = (answer(command("generate", "--model", model, *options)) for model in (trained, exported))
    assert run["samples"] == export["samples"]


def test_greedy_generation_draws_nothing(command: Command, trained: Path) -> None:
    options = ("--prompt", "a", "--temperature", "0", "--top-k", "3", "--samples", "2")
    done = command("generate", "--model", trained, *options)
    assert done.returncode == 2
    assert "--temperature 0 is greedy, and says one thing only: leave out --samples and --top-k" in done.stderr


@pytest.mark.parametrize("device", ["meta", "abacus"])
def test_devices_that_cannot_compute_are_refused(command: Command, trained: Path, device: str) -> None:
    error = the_error(command("generate", "--model", trained, "--prompt", "a", "--device", device))
    assert f"--device {device}: is not here" in error


def test_many_prompts_in_batches_are_each_alone(
    command: Command, trained: Path, exported: Path, tmp_path: Path
) -> None:
    """Of run and export, one by one and together, all draw the same; what is typed has seeds that count on."""
    prompts = ["import ", "x", "for line in "]
    (tmp_path / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in prompts))
    options = ("--max-new-tokens", "12", "--seed", "3", "--json")
    file = (*options, "--prompts", tmp_path / "prompts.txt", "--samples", "2")
    found = [
        answer(command("generate", "--model", model, *file, "--batch-size", size))["samples"]
        for model in (trained, exported)
        for size in ("1", "4")
    ]
    assert found[1:] == found[:1] * 3
    assert [(sample["prompt"], sample["seed"]) for sample in found[0]] == [
        (prompt, seed) for prompt in prompts for seed in (3, 4)
    ]
    assert len({tuple(sample["tokens"]) for sample in found[0]}) > 1
    alone = answer(command("generate", "--model", trained, *options, "--prompt", "x"))["samples"]
    assert alone == found[0][2:3]
    printed = command("generate", "--model", trained, *file[:4], *file[5:], "--batch-size", "4")
    assert printed.stdout == "\n".join(
        f"=== {each['prompt']!r}, sample {each['seed'] - 2}, seed {each['seed']}\n{each['prompt']}{each['text']}\n"
        for each in found[0]
    )
    single = ("--model", trained, *options[:4], "--prompt", "x")
    for size in ("1", "4"):
        drawn = command("generate", *single, "--samples", "2", "--batch-size", size).stdout
        assert drawn == "\n".join(
            f"=== sample {number}, seed {each['seed']}\nx{each['text']}\n"
            for number, each in enumerate(found[0][2:4], start=1)
        )
    assert command("generate", *single).stdout == f"x{alone[0]['text']}\n"
    assert re.search(r"^\d+ tokens read and 72 written in .* tokens per second$", printed.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("rounding", "shared"),
    [
        ({"activations": "nvfp4"}, "activations e2m1 (group of 16, e4m3 scales)"),
        ({"kv_cache": 8}, "kv_cache int8 (tensor)"),
        ({"weights": 4, "activations": "mxfp4"}, None),
    ],
    ids=str,
)
def test_rounding_by_other_rows_of_a_batch_is_said(
    caplog: pytest.LogCaptureFixture, rounding: dict[str, Any], shared: str | None
) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape = ModelConfig.model_validate({**sizes, "max_position_embeddings": 8})
    model = build_decoder(shape, device="cpu")
    apply_precision(model.model.layers, PrecisionConfig.model_validate(rounding))
    check_rounding(model, None, 1)
    assert not caplog.messages, "a row that is alone shares nothing"
    check_rounding(model, None, 4)
    assert [shared in message for message in caplog.messages if shared] == [True] * (shared is not None)
    assert len(caplog.messages) == (shared is not None)


def test_without_a_length_a_continuation_fills_the_room_behind_the_longest_prompt(
    command: Command, trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompts").write_text(f"x\n{'x' * 30}\n")
    said = answer(command("generate", "--model", trained, "--prompts", tmp_path / "prompts", "--json"))
    assert said["max_new_tokens"] == 2, "of a context of 32"
    unlimited = SimpleNamespace(context_length=None)
    assert usual_length(unlimited, None, ["x" * 5000]) == 100  # type: ignore[arg-type]
    refused = command("generate", "--model", trained, "--prompt", "x" * 40)
    assert "40 prompt tokens + 1 new ones exceed max_position_embeddings = 32" in refused.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--prompt", "x" * 30, "--max-new-tokens", "3"),
            "30 prompt tokens + 3 new ones exceed max_position_embeddings",
        ),
        (("--max-new-tokens", "1000000000"), "1 prompt tokens + 1000000000 new ones exceed"),
    ],
)
def test_what_a_model_cannot_continue_is_refused_before_its_weights_are_read(
    command: Command, trained: Path, exported: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    shutil.copytree(exported, tmp_path / "export")
    for weights in tmp_path.rglob("*.safetensors"):
        weights.write_bytes(b"")
    for model in ("run", "export"):
        assert message in the_error(command("generate", "--model", tmp_path / model, *options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--top-p", "nan"), "--top-p = nan: lies in (0, 1]"),
        (("--top-p", "0"), "--top-p = 0.0: lies in (0, 1]"),
        (("--top-p", "2"), "--top-p = 2.0: lies in (0, 1]"),
        (("--temperature", "inf"), "--temperature = inf: 0 is greedy"),
        (("--seed", "9223372036854775808"), "--seed: 9223372036854775808 is not below 2^63"),
        (("--interactive", "--json"), "leave out --json"),
        (("--think", "first", "--batch-size", "2"), "--think first is for one sequence at a time"),
    ],
)
def test_what_no_model_can_be_asked_is_refused_with_the_command_line(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: Any, message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["generate.py", "--model", str(trained), *options])
    with pytest.raises(SystemExit, match="2"):
        plumbline.launcher.generate.parse_arguments()
    assert message in capsys.readouterr().err


def test_lines_that_are_typed_are_continued_one_after_the_other(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line that does not fit is answered why, and the next one is asked for."""
    words = ["generate.py", "--model", str(trained), "--max-new-tokens", "8", "--device", "cpu"]

    def said(*options: str, typed: str = "") -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", [*words, *options])
        monkeypatch.setattr(sys, "stdin", StringIO(typed))
        plumbline.launcher.generate.main()
        return capsys.readouterr()

    expected = "".join(said("--prompt", "import ", "--seed", seed)[0] for seed in ("5", "7"))
    out, errors = said("--interactive", "--seed", "5", typed=f"import \n{'x' * 30}\nimport \n")
    assert out == expected
    assert "30 prompt tokens + 8 new ones exceed" in errors
    assert errors.count("tokens per second") == 1


def test_plain_text_is_scored_as_a_corpus_that_is_held_out_whole(
    command: Command, trained: Path, exported: Path, tmp_path: Path
) -> None:
    book = tmp_path / "book.txt"
    book.write_text(Path(json.__file__).read_text(encoding="utf-8"))
    size = book.stat().st_size
    error = the_error(command("eval", "--model", trained, "--data", book))
    assert f"{book}: no corpus here" in error
    assert f"--text {book}" in error
    tokenizer, output = (re.search(rf"--{name} (\S+)", error) for name in ("tokenizer", "output"))
    assert tokenizer is not None
    assert tokenizer[1] == str(trained / "tokenizer"), "that of the model"
    assert output is not None
    assert output[1] == "corpora/book", "not the text itself"
    exam = ("--output", tmp_path / "exam", "--validation-fraction", "1")
    done = command("prepare", "--source", book, "--tokenizer", tokenizer[1], *exam, "--json")
    made = answer(done)
    assert made["splits"] == {"validation": {"documents": 1, "tokens": size + 1, "source_bytes": size, "shards": []}}
    assert made["unigram_entropy"] is None
    assert made["next"] == f"python {REPOSITORY}/launcher/eval.py --model RUN --data {tmp_path / 'exam'}"
    of_corpus = answer(command("eval", "--model", trained, "--data", tmp_path / "exam", "--json"))
    assert of_corpus["tokens"] == size
    for model in (trained, exported):
        of_text = answer(command("eval", "--model", model, "--text", book, "--sequence-length", "32", "--json"))
        assert of_text["data"] == str(book)
        assert of_text["loss"] == pytest.approx(of_corpus["loss"], abs=1e-5)
        assert of_text["bits_per_byte"] == pytest.approx(of_corpus["bits_per_byte"], abs=1e-5)
        assert of_text["tokens"] == size


def test_text_comes_from_standard_input(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def score(text: bytes) -> dict[str, Any]:
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(text)))
        words = ["--model", str(trained), "--text", "-", "--device", "cpu", "--json"]
        monkeypatch.setattr(sys, "argv", ["eval.py", *words])
        plumbline.launcher.eval.main()
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    found = score("naïve\n".encode())
    assert (found["data"], found["tokens"]) == ("standard input", 7)
    with pytest.raises(ValueError, match="--text -: no document to read"):
        score(b"")


@pytest.mark.parametrize("option", ["--data", "--task", "--tasks"])
def test_nothing_to_score_on_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["eval.py", "--model", str(tmp_path), option, ""])
    with pytest.raises(SystemExit) as ended:
        plumbline.launcher.eval.main()
    assert ended.value.code == 2
    assert f"error: {option}: is empty, as a shell leaves it of a variable that is not set" in capsys.readouterr().err
