"""Mistakes of every day: one line for each, and a remedy that is the right one."""

from pathlib import Path

import pytest
import yaml

from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import last_step
from plumbline.launcher.runtime.config.written import read_values
from plumbline.launcher.runtime.optim.schedule import check_phases
from plumbline.launcher.runtime.sweep.config import load_sweep
from tests.launcher.runtime.config.conftest import SMALL, problems


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.max_iters=1", "train.max_iters = 1: unknown key; did you mean train.steps?"),
        ("train.seed=1", "train.seed = 1: unknown key; did you mean run.seed?"),
        ("training.lr=1", "training = {'lr': 1}: unknown key; did you mean optimizer.lr?"),
        (
            "objective.lambda=1",
            "objective.lambda = 1: unknown key; did you mean objective.weight? It needs objective.name: "
            "latent_lookahead, multi_token, sequential_mtp or registers",
        ),
        ("objective.masks=dense", "objective.masks = 'dense': unknown key; needs objective.name: latent_lookahead"),
        ("train.tau=1", "train.tau = 1: unknown key; did you mean horizon.tau?"),
        ("metrics.diagnostics_interval=0", "metrics.diagnostics_interval = 0: it has to be greater than 0, or null"),
        ("model.num_attention_heads=0", "model.num_attention_heads = 0: it has to be greater than 0"),
        ("model.hidden_size=word", "model.hidden_size = 'word': a whole number is expected"),
        ("train.tokens=2.5B", "train.tokens = '2.5B': a whole number is expected: write 2.5e9"),
        ("train.steps=10k", "train.steps = '10k': a whole number is expected: write 10e3"),
        ("model.sliding_window=1", "model.sliding_window = 1: it has to be at least 2, or null"),
        (
            "deepspeed.precision=fp16",
            "deepspeed.precision = 'fp16': it may be 'bf16' or 'fp32'; losses are not scaled, as fp16 would need it",
        ),
        ("data.sequence_length=-1", "data.sequence_length = -1: it has to be at least 1"),
    ],
)
def test_one_mistake_is_one_line(file: Path, override: str, line: str) -> None:
    assert problems(file, override)[1:] == [f"  {line}"]


@pytest.mark.parametrize("name", ["tau", "heads"])
def test_the_papers_names_of_an_objective_s_keys_are_known_in_its_section(file: Path, name: str) -> None:
    told = problems(file, "objective.name=multi_token", f"objective.{name}=4")[1:]
    assert told == [f"  objective.{name} = 4: unknown key; did you mean objective.horizon?"]


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("optimizer.lr", ", for example optimizer.lr=0.003, or SECTION=null"),
        ("=3", ", for example optimizer.lr=0.003, or SECTION=null"),
        ("lr=1", "; did you mean optimizer.lr?"),
        ("max_iters=1", "; did you mean train.steps?"),
        ("resume=true", "; the same command goes on from the newest whole checkpoint"),
    ],
)
def test_what_is_not_an_override_is_refused(file: Path, override: str, hint: str) -> None:
    assert problems(file, override) == [f"{override!r}: an override is section.key=value{hint}"]


@pytest.mark.parametrize("entry", ["data.train.0", "data.train[0]"])
def test_an_override_leads_into_a_list(file: Path, entry: str) -> None:
    train = load_config(file, [f"{entry}.weight=2", f"{entry}.name=other", "train.steps=5"]).data.train
    assert [(source.weight, source.name) for source in train] == [(2.0, "other")]


@pytest.mark.parametrize("override", ["data.train.1.weight=1", "data.train.-1.weight=1", "data.train.x=1"])
def test_an_entry_that_a_list_lacks_is_named(file: Path, override: str) -> None:
    (line,) = problems(file, override)
    assert line.startswith(f"{override}: there is no ")
    assert line.endswith("but 1 entries, counted from 0")


def test_a_float_that_is_whole_is_an_integer_where_one_is_expected(file: Path) -> None:
    config = load_config(file, ["train.tokens=1e6", "data.sequence_length=1.6e1", "optimizer.lr=1"])
    assert (config.train.tokens, config.data.sequence_length, config.optimizer.lr) == (1_000_000, 16, 1.0)
    assert isinstance(config.train.tokens, int)
    assert problems(file, "train.steps=1.5")[1:] == ["  train.steps = 1.5: a whole number is expected"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["schedule.warmup=11 steps"],
            "schedule.warmup = 11 steps and schedule.decay = 20%: 13 steps, but the run has 10",
        ),
        (["schedule.warmup=50%", "schedule.decay=60%"], "11 steps, but the run has 10"),
        (["schedule.decay=1e9 tokens"], "schedule.decay = 1000000000 tokens"),
        (["schedule.decay=1 tokens"], "schedule.decay = 1 tokens: .* one step .* would never decay"),
        (["schedule.decay=1 steps"], "schedule.decay = 1 steps: .* one step .* would never decay"),
        (
            ["schedule.name=cosine", "schedule.warmup=11 steps"],
            "schedule.warmup = 11 steps: 11 steps, but the run has 10",
        ),
        (
            ["data.global_batch_size=8", "data.batch_size_warmup=[{tokens: 1e9, global_batch_size: 4}]"],
            "data.batch_size_warmup: it lasts to step .*, but the run has 10: shorten it",
        ),
        (  # 8 steps of 1 sequence, then 2 of 8: 24 in all, and each phase takes 16
            [
                "data.global_batch_size=8",
                "data.micro_batch_size=1",
                "data.batch_size_warmup=[{tokens: 1, global_batch_size: 1}]",
                "schedule.warmup=512 tokens",
                "schedule.decay=512 tokens",
            ],
            "schedule.warmup = 512 tokens and schedule.decay = 512 tokens: 1,024 tokens, but the run has 768",
        ),
    ],
)
def test_phases_that_do_not_fit_the_run_are_refused(file: Path, overrides: list[str], words: str) -> None:
    config = load_config(file, overrides)
    with pytest.raises(ValueError, match=words):
        check_phases(config.schedule, config.data.batch_plan, last_step(config))


def test_phases_as_long_as_the_run_are_not(file: Path) -> None:
    for overrides in (["schedule.warmup=80%"], ["schedule.name=cosine", "schedule.warmup=10 steps"]):
        config = load_config(file, overrides)
        check_phases(config.schedule, config.data.batch_plan, last_step(config))


def test_null_takes_a_section_away(file: Path) -> None:
    file.write_text(yaml.safe_dump({**SMALL, "schedule": {"name": "cosine"}}))
    assert load_config(file, ["schedule=null"]).schedule.name == "wsd"
    in_order = ["schedule.final_lr_fraction=0.5", "schedule=~", "schedule.warmup=1 steps"]
    schedule = load_config(file, in_order).schedule
    assert (schedule.name, schedule.final_lr_fraction, str(schedule.warmup)) == ("wsd", 0.0, "1 steps")
    with pytest.raises(ValueError, match=r"initialize_from = nowhere: cannot be read"):
        load_config(file, ["model=null", "train.initialize_from=nowhere"])
    assert problems(file, "modle=null")[1:] == ["  modle = null: unknown key; did you mean model?"]
    assert "an override is section.key=value" in problems(file, "model=qwen3")[0]


def test_a_file_of_something_else_is_told_in_a_few_lines(tmp_path: Path, file: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    line, *_ = problems(tmp_path / "config.json")
    assert "no configuration of a run: it has none of the sections run, model, " in line
    flat = tmp_path / "flat.yaml"
    flat.write_text("n_layer: 2\nlearning_rate: 0.1\nwhatever: 3\n")
    assert problems(flat)[1:] == [
        "  n_layer: did you mean model.num_hidden_layers?",
        "  learning_rate: did you mean optimizer.lr?",
    ]
    lines = problems(file, *(f"train.key{number}=1" for number in range(50)))
    assert lines[0] == f"{file} with its overrides: 50 problem(s) in the configuration"
    assert (len(lines), lines[-1]) == (42, "  ... and 10 more")


def test_a_key_under_another_name_is_not_missing_as_well(file: Path) -> None:
    model = {key: value for key, value in SMALL["model"].items() if key not in ("hidden_size", "num_hidden_layers")}
    file.write_text(yaml.safe_dump({**SMALL, "model": {**model, "n_embd": 64, "num_hiden_layers": 2}}))
    assert problems(file)[1:] == [
        "  model.n_embd = 64: unknown key; did you mean model.hidden_size?",
        "  model.num_hiden_layers = 2: unknown key; did you mean num_hidden_layers?",
    ]
    file.write_text(yaml.safe_dump({key: value for key, value in SMALL.items() if key != "parameterization"}))
    (line,) = problems(file)[1:]
    assert line.startswith("  parameterization: missing, and it has no default, such as {rule: sp}, or {rule: ")


def test_what_is_wrong_with_a_corpus_is_told(file: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus.json").write_text("{}")
    line = "\n".join(problems(file, "model.vocab_size=null", f"data.train=[{{path: {tmp_path}}}]"))
    assert line.startswith(f"data.train.0.path = {tmp_path}: holds no readable corpus.json")
    assert "tokenizer: Field required; prepare the corpus again" in line
    assert "corpora beside it" not in line


@pytest.mark.parametrize("level", ["- ", "? ", "[", "{a: ", "[!!seq ", "- ? "])
def test_nesting_without_end_is_refused_and_ends_no_process(file: Path, tmp_path: Path, level: str) -> None:
    (tmp_path / "deep.yaml").write_text(level * 30_000 + "x\n")
    (line,) = problems(tmp_path / "deep.yaml")
    assert line.endswith("deep.yaml: cannot be read as YAML: it is nested too deeply")
    (line,) = problems(file, f"run.name={'[' * 30_000}")
    assert line.endswith("cannot be read as YAML: it is nested too deeply")


def test_a_folder_and_a_sweep_are_no_configuration_of_a_run(file: Path) -> None:
    (told,) = problems(file.parent)
    assert told == f"{file.parent}: is a folder; name a file in it, which holds {file.name}"
    file.write_text(yaml.safe_dump({"name": "x", "base": "y.yaml", "grids": []}))
    (told,) = problems(file)
    assert told == f"{file}: is a sweep, which trains many runs: launcher/sweep.py --config {file}"


def test_a_configuration_of_a_run_is_no_sweep(file: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_sweep(file)
    assert f"is the configuration of one run: train it with launcher/pretrain.py --config {file}" in str(refused.value)


def test_an_error_of_the_disk_stays_one_and_names_the_file() -> None:
    """It may pass, so the job script asks again. Linux reads nothing at the start of this file."""
    with pytest.raises(OSError, match=r"\[Errno 5\] .*'/proc/self/mem'"):
        read_values(Path("/proc/self/mem"), [])
