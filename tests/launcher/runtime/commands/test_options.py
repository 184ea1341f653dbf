"""What the parser and the types of options say to mistakes."""

import argparse
import json
import math
from pathlib import Path

import pytest

from plumbline.launcher.runtime.commands import cli


def test_a_path_that_is_not_there_is_answered_with_those_most_like_it(tmp_path: Path) -> None:
    for name in ("corpora", "runs", ".corpra", ".git", *"abcdefghijkl"):
        (tmp_path / name).touch()
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        cli.existing(str(tmp_path / "corpra"))
    start, _, names = str(refused.value).partition(f"; {tmp_path} holds ")
    assert start == f"{tmp_path / 'corpra'}: no such file or folder"
    assert names.split(", ")[0] == "corpora"
    assert len(names.split(", ")) == 10
    assert ", ." not in names
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".hidden").touch()
    with pytest.raises(argparse.ArgumentTypeError, match=r"empty holds nothing like it$"):
        cli.existing(str(tmp_path / "empty" / "hidden"))


def test_a_url_where_a_path_is_taken_is_no_missing_path() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"^http://host/a: files and folders .*; copy it here$"):
        cli.existing("http://host/a")


@pytest.mark.parametrize("given", [["--optimizer.lr=1"], ["--optimizer.lr", "1"], ["-optimizer.lr=1"]])
def test_an_override_written_as_an_option_is_told_how_it_is_written(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parser = cli.Parser()
    parser.add_argument("overrides", nargs="*")
    with pytest.raises(SystemExit) as left:
        parser.parse_args(given)
    assert left.value.code == 2
    assert "keys of the configuration have no dashes: optimizer.lr=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--config", "x.yaml", "--resume"], "a run resumes by itself: the same command goes on"),
        (["x.yaml", "train.steps=3"], "did you mean --config x.yaml?"),
        (["--config", "x.yaml", "--dryrun"], "--dryrun; did you mean --dry-run?"),
        (["--config", "x.yaml", "--lr", "3"], "--lr; values of the configuration are written section.key=VALUE"),
    ],
)
def test_habits_of_other_trainers_are_answered(
    given: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain.py", *given])
    parser = cli.Parser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("overrides", nargs="*")
    with pytest.raises(SystemExit):
        parser.parse_intermixed_args()
    assert words in capsys.readouterr().err


def test_a_second_value_is_told_that_there_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a shell makes of --data corpora/*."""
    parser = cli.Parser()
    parser.add_argument("--data")
    parser.add_argument("--many", nargs="+")
    parser.add_argument("--name")
    for given, told in (
        (["--data", "a", "b"], True),
        (["--many", "a", "--data", "a", "b", "c"], True),
        (["b"], False),
        (["x", "--name", "y", "--data", "x"], False),
    ):
        monkeypatch.setattr("sys.argv", ["eval.py", *given])
        with pytest.raises(SystemExit):
            parser.parse_args()
        assert ("; --data takes one value" in capsys.readouterr().err) == told


def test_only_a_run_is_exported() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="hf:gpt2 is a Hugging Face folder already; give a run"):
        cli.own_model("hf:gpt2")


def test_an_option_of_sbatch_that_no_job_has_is_told_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    parser = cli.Parser()
    cli.add_job_options(parser, "a job")
    with pytest.raises(SystemExit):
        parser.parse_args(["--mem", "64G"])
    assert "variables in slurm/cluster.env, --mem as SBATCH_MEM_PER_NODE" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parser.parse_args(["--partitoin", "gpu"])
    assert "--partitoin gpu; did you mean --partition?" in capsys.readouterr().err


def test_what_is_printed_is_json_even_of_numbers_that_json_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    cli.print_json({"loss": math.nan, "losses": (1.5, math.inf)})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"loss": None, "losses": [1.5, None]}
