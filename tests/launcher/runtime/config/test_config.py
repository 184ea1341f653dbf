"""A configuration is taken as it is meant, or refused in words that say what to change."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.identity import differences
from plumbline.launcher.runtime.config.load import load_config, save_config
from plumbline.launcher.runtime.config.parse import parse
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.remarks import cautions
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.optim.duration import Duration
from tests.launcher.runtime.config.conftest import SMALL, problems

REPOSITORY = Path(__file__).resolve().parents[4]


def test_overrides_win_and_are_typed(file: Path) -> None:
    overrides = [
        "optimizer.lr=4e-3",
        "train.compile=true",
        "run.name=other",
        "optimizer.betas=[0.8, 0.9]",
        "optimizer.lr=2e-3",
    ]
    config = load_config(file, overrides)
    assert config.optimizer.lr == 2e-3, "the last one wins"
    assert config.optimizer.betas == [0.8, 0.9]
    assert config.train.compile is True
    assert config.run.name == "other"
    assert config.run.folder == Path("runs/other")


def test_a_tilde_is_the_home_folder(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = ["run.root=~/runs", "data.train=[{path: ~/a}, {path: [~/b-*, s3://c/~d]}]", "data.cache.path=~/cache"]
    config = load_config(file, [*paths, "model.vocab_size=99", "guards.transfer.base=~/base"])
    assert config.run.folder == tmp_path / "runs" / config.run.name
    assert [source.paths for source in config.data.train] == [[f"{tmp_path}/a"], [f"{tmp_path}/b-*", "s3://c/~d"]]
    assert config.data.cache.folder == tmp_path / "cache"
    assert config.guards.transfer.base == f"{tmp_path}/base"


def test_an_override_replaces_a_list_and_adds_to_a_section(file: Path) -> None:
    config = load_config(file, ["data.train=[{path: a, weight: 2}, {path: b}]", "deepspeed.zero_stage=3"])
    assert [(source.path, source.weight) for source in config.data.train] == [("a", 2.0), ("b", 1.0)]
    assert (config.deepspeed.zero_stage, config.deepspeed.precision) == (3, "bf16")


def test_null_takes_a_value_away(file: Path) -> None:
    assert load_config(file, ["train.steps=null", "train.tokens=1000"]).train.tokens == 1000


def test_extends_is_a_chain_of_files_relative_to_each_other(file: Path, tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "middle.yaml").write_text(
        "extends: ../small.yaml\noptimizer: {lr: 0.2}\ntrain: {steps: 20}\n"
    )
    (tmp_path / "top.yaml").write_text("extends: deeper/middle.yaml\ntrain: {steps: 30}\n")
    config = load_config(tmp_path / "top.yaml", ["model.hidden_size=128"])
    assert (config.train.steps, config.optimizer.lr, config.model.hidden_size) == (30, 0.2, 128)
    assert config.model.num_hidden_layers == 2


def test_extends_of_a_missing_file_says_what_is_there(file: Path, tmp_path: Path) -> None:
    (tmp_path / "top.yaml").write_text("extends: smal.yaml\n")
    (line,) = problems(tmp_path / "top.yaml")
    assert "smal.yaml: no such file" in line
    assert str(file) in line


@pytest.mark.parametrize(
    "text",
    [
        "run: {name: '${oc.env:SECRET}'}",
        "extends: ${oc.env:SECRET}",
        "data: {train: [{path: 'a/${ oc.env:SECRET}'}]}",
        "run: {name: '${${metrics.project}:SECRET}'}\nmetrics: {project: oc.env}",
        "run: {name: '${oc.${metrics.project}:SECRET}'}\nmetrics: {project: env}",
        "run: {name: '${metrics.${oc.env:SECRET}}'}",
        "run: {name: '\\\\\\\\${oc.env:SECRET}'}",
    ],
)
def test_a_file_cannot_read_the_environment(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hidden")
    (tmp_path / "strange.yaml").write_text(text)
    (line,) = problems(tmp_path / "strange.yaml")
    assert "a file can insert other keys only" in line
    assert "hidden" not in line


@pytest.mark.parametrize(("text", "read"), [("010", 8), ("1:30", 90), ("-0_17", -15), ("0:1.5", 1.5)])
def test_a_number_is_not_read_in_another_base(file: Path, tmp_path: Path, text: str, read: float) -> None:
    (tmp_path / "odd.yaml").write_text(f"extends: {file.name}\ntrain: {{steps: [{text}]}}\n")
    for path, given in ((tmp_path / "odd.yaml", []), (file, [f"train.steps={text}"]), (file, [f"data.train=[{text}]"])):
        (line,) = problems(path, *given)
        assert f"{text}: YAML reads it as {read}; write a number without a leading zero" in line
    assert load_config(file, [f"metrics.project='{text}'"]).metrics.project == text


def test_what_a_file_says_is_not_repeated_when_it_is_no_yaml(tmp_path: Path) -> None:
    (tmp_path / "passwords").write_text("root:x:0:0:root:/root:/bin/bash\nme: [secret\n")
    (tmp_path / "top.yaml").write_text("extends: passwords\n")
    (line,) = problems(tmp_path / "top.yaml")
    assert "cannot be read as YAML" in line
    assert "line 2" in line
    assert "secret" not in line
    assert "bash" not in line


def test_extends_in_a_circle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    assert "extends" in problems(tmp_path / "a.yaml")[0]


@pytest.mark.parametrize("text", ["[1, 2]", "run: {name", "run: !!python/object:os.system {}", "\x00"])
def test_what_is_not_yaml_sections_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert problems(path)[0].startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("optimizer.frequency=1", "optimizer.frequency = 1: unknown key; known keys: name, lr, betas"),
        ("optimizer.learning_rate=1", "optimizer.learning_rate = 1: unknown key; did you mean optimizer.lr?"),
        ("train.gradient_accumulation_steps=1", "train.gradient_accumulation_steps = 1: unknown key; it follows from"),
        ("model.family=mistral", "model.family = mistral: there is none of that name; it is one of qwen3, llama, "),
        ("data.train.0.weight=-1", "data.train.0.weight = -1: "),
        ("data.train={a: 1}", "data.train = {'a': 1}: a list is expected, such as data.train=[{path: corpora/NAME"),
        ("data.train=[corpora/x]", "data.train.0 = 'corpora/x': a section of keys is expected, such as data.train=["),
        ("run.name=my run", "run.name = 'my run': a name has letters, digits and"),
        ("run.name=..", "run.name = '..': "),
        ("model.num_hidden_layers=1000000000", "model.num_hidden_layers = 1000000000: it may be"),
        ("optimizer.weight_deacy=1", "optimizer.weight_deacy = 1: unknown key; did you mean weight_decay?"),
        ("model.hiden_size=1", "model.hiden_size = 1: unknown key; did you mean hidden_size?"),
        ("optimiser.lr=1", "optimiser = {'lr': 1}: unknown key; did you mean optimizer?"),
        ("data.train=[{pth: x}]", "data.train.0.pth = 'x': unknown key; did you mean path?"),
        ("objective.name=lookahead", "objective.name = lookahead: there is none of that name; did you mean latent_loo"),
        (
            "objective.name=x",
            "objective.name = x: there is none of that name; it is one of next_token, latent_lookahead",
        ),
        (
            "model.rope_scaling={rope_type: lama3}",
            "model.rope_scaling.rope_type = lama3: there is none of that name; did",
        ),
        (
            "model.rope_scaling={factor: 2}",
            "model.rope_scaling = {'factor': 2}: a section of keys is expected, its rope_",
        ),
        ("model.rope_scaling=2", "model.rope_scaling = 2: a section of keys is expected"),
        ("data.train=[{task: {arms: 2}}]", "data.train.0.task = {'arms': 2}: a section of keys is expected, its name"),
        ("train.steps=ten", "train.steps = 'ten': "),
        ("train.steps=1.5", "train.steps = 1.5: "),
        ("train.steps=0", "train.steps = 0: "),
        ("optimizer.lr=-1", "optimizer.lr = -1: "),
        ("train.compile=1", "train.compile = 1: "),
        ("run.name=a/b", "run.name = 'a/b': "),
        ("deepspeed.zero_stage=4", "deepspeed.zero_stage = 4: "),
        ("deepspeed.precision=fp16", "deepspeed.precision = 'fp16': it may be 'bf16' or 'fp32'"),
        ("deepspeed.precision=[1]", "deepspeed.precision = [1]: it may be 'bf16' or 'fp32'"),
        (
            "train.activation_checkpointing=true",
            "train.activation_checkpointing = true: it may be none, selective, full, auto, or n for every n-th block",
        ),
        ("schedule.name=step", "schedule.name = step: there is none of that name; it is one of wsd, cosine"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas = [0.9, 1.0]: both lie in [0, 1)"),
        ("model.num_attention_heads=3", "model.hidden_size = 64 does not divide by num_attention_heads = 3"),
        ("parameterization.rule=completep", "parameterization: rule: completep needs base_hidden_size"),
        (
            "model.max_position_embeddings=16",
            "data.sequence_length = 32 exceeds model.max_position_embeddings = 16",
        ),
        ("objective.pruning_weight=0.1", "objective.pruning_weight = 0.1 belongs to model.attention: pruned, and "),
        ("objective.pruning_steps=4", "objective.pruning_steps = 4 belongs to model.attention: pruned, and it is "),
        ("model.block=skipless", "model.block = skipless loses the tokens' identity"),
        ("train.steps=null", "train: how long? give steps or tokens"),
        ("checkpoint.local={path: scratch, interval: 5}", "checkpoint.local.path = scratch: give the absolute path"),
        ("checkpoint.local={path: /scratch}", "checkpoint.local.interval: missing, and it has no default"),
    ],
)
def test_a_problem_names_path_value_and_remedy(file: Path, override: str, line: str) -> None:
    lines = problems(file, override)
    assert lines[0].startswith(f"{file} with its overrides: ")
    assert any(found.startswith(f"  {line}") for found in lines), lines


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["objective.horizon=33"],
            "objective.horizon = 33 is more than data.sequence_length = 32 has room for",
        ),
        (
            ["objective.anchors=33"],
            "objective.anchors = 33 is more than data.sequence_length = 32 has room for",
        ),
        (
            ["objective.name=multi_token", "objective.horizon=40"],
            "objective.horizon = 40 is more than data.sequence_length",
        ),
        (
            ["objective.name=coconut", "objective.weight=1.0"],
            "objective.weight = 1.0: unknown key; needs objective.name: latent_lookahead, ",
        ),
        (["objective.horizon=0"], "objective.horizon = 0: it has to be greater than 0"),
        (["objective.passes=2"], "objective.passes = 2 belongs to growth: fixed; it is grow"),
        (["objective.anchor_policy=sequential"], "objective.anchor_policy = sequential begins where labels begin"),
        (
            ["objective.name=pause", "objective.anchor_policy=response_start"],
            "objective.anchor_policy = response_start begins where labels begin",
        ),
        (
            ["objective.masks=blocks", "model.dropout=0.1"],
            "objective.masks = blocks: the kernel does not serve this model: model.dropout = 0.1; set dense",
        ),
        (
            ["objective.masks=blocks", "model.attention_sink=true"],
            "objective.masks = blocks: the kernel does not serve this model: attention has a cap or sinks; set dense",
        ),
        (
            ["objective.masks=blocks", "model.head_dim=8"],
            "objective.masks = blocks: the kernel does not serve this model: model.head_dim = 8 is below 16; set dense",
        ),
    ],
)
def test_thoughts_that_cannot_be_are_refused(file: Path, overrides: list[str], line: str) -> None:
    lines = problems(file, "objective.name=latent_lookahead", *overrides)
    assert any(line in found for found in lines), lines


def test_thoughts_as_long_as_the_text_allows_are_not(file: Path) -> None:
    most = ["objective.horizon=31", "objective.anchors=32", "objective.masks=blocks", "model.head_dim=16"]
    load_config(file, ["objective.name=latent_lookahead", *most, "objective.growth=fixed", "objective.passes=2"])


def test_offloading_without_sharding_is_refused(file: Path) -> None:
    lines = problems(file, "deepspeed.zero_stage=0", "deepspeed.offload_optimizer=true")
    assert lines[1:] == ["  deepspeed.offload_optimizer = true needs zero_stage 1, 2 or 3"]


def test_all_problems_are_reported_at_once(file: Path) -> None:
    lines = problems(file, "train.stepz=1", "optimizer.lr=fast", "data.micro_batch_size=0", "deepspeed.zero_stage=9")
    assert lines[0] == f"{file} with its overrides: 4 problem(s) in the configuration"
    assert sorted(line.split(" = ")[0].strip() for line in lines[1:]) == [
        "data.micro_batch_size", "deepspeed.zero_stage", "optimizer.lr", "train.stepz"
    ]  # fmt: skip


def float_fields(schema: type[BaseModel], path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the place of every float that values for `schema` may hold, all kinds of each section included."""
    for name, field in schema.model_fields.items():
        yield from floats_in(field.annotation, (*path, name))


def floats_in(annotation: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Yield the places of floats in values of one type."""
    if annotation is float:
        yield path
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from float_fields(annotation, path)
    elif get_origin(annotation) is list:
        yield from floats_in(get_args(annotation)[0], (*path, 0))
    elif get_origin(annotation) is dict:
        yield from floats_in(get_args(annotation)[1], (*path, "any_key"))
    else:
        for choice in get_args(annotation):
            yield from floats_in(choice, path)


def test_no_float_may_be_nan_or_infinite() -> None:
    """Every float field of the whole schema, found by walking it, so that a new one is tested from its first day."""
    places = sorted(set(float_fields(Config)), key=str)
    assert {("optimizer", "lr"), ("optimizer", "betas", 0), ("data", "train", 0, "weight")} <= set(places)
    assert len(places) > 30
    for place in places:
        for value in (math.nan, math.inf, -math.inf):
            values: Any = value
            for part in reversed(place):
                values = [values] if part == 0 else {part: values}
            with pytest.raises(ConfigError) as caught:
                parse(Config, values, source="here")
            line = f"  {'.'.join(map(str, place))} = {value}: a finite number is expected"
            assert str(caught.value).splitlines() == ["here: 1 problem(s) in the configuration", line]


@pytest.mark.parametrize(("written", "value"), [(".nan", "nan"), ("-.inf", "-inf"), ("1e999", "inf")])
def test_non_finite_numbers_are_refused_however_they_are_written(file: Path, written: str, value: str) -> None:
    lines = problems(file, f"optimizer.weight_decay={written}", "train.steps=5")
    assert lines[1:] == [f"  optimizer.weight_decay = {value}: a finite number is expected"]


def test_a_local_checkpoint_that_would_never_be_the_newest_is_refused(file: Path) -> None:
    local = ["checkpoint.local.path=/scratch", "checkpoint.local.interval=50"]
    lines = problems(file, "checkpoint.interval=50", *local)
    assert lines[1].startswith("  checkpoint: local.interval = 50 is not below checkpoint.interval = 50")
    load_config(file, ["checkpoint.interval=51", *local])
    load_config(file, local)


def test_what_sections_ask_of_one_another_is_reported_at_once(file: Path) -> None:
    lines = problems(file, "model.max_position_embeddings=16", "optimizer.name=soap", "objective.pruning_weight=0.1")
    assert [line.split(" ")[2] for line in lines[1:]] == [
        "data.sequence_length", "objective.pruning_weight", "deepspeed.zero_stage"
    ]  # fmt: skip


def test_what_is_written_is_checked_before_any_corpus_or_model_is_looked_at(tiny_config: Path, file: Path) -> None:
    """So a user who has a typo and no corpus yet is told of the typo first."""
    lines = problems(tiny_config, "data.train=[{path: nowhere}]", "train.stepz=1", "model.block=skipless")
    assert {line.split(" ")[2] for line in lines[1:]} == {"model.block", "train.stepz"}
    file.write_text(yaml.safe_dump({**SMALL, "model": None}))
    lines = problems(file, "train.initialize_from=nowhere", "train.stepz=1")
    assert lines[1:] == ["  train.stepz = 1: unknown key; did you mean steps?"]


def test_what_only_the_tensors_tell_is_reported_at_once_by_the_plan(file: Path) -> None:
    config = load_config(
        file,
        [
            "precision.weights={format: int4, granularity: group, group_size: 24}",
            "parameterization.lr_multipliers={nothing: 2.0}",
        ],
    )
    with pytest.raises(ConfigError) as caught:
        plan_run(config)
    title, precision, multipliers = str(caught.value).splitlines()
    assert title == "2 problem(s) in the configuration"
    assert precision.startswith("  precision.weights: groups of 24 do not divide the 64 values of a row of model.")
    assert multipliers.startswith("  parameterization.lr_multipliers: nothing matches no parameter")


def test_a_plan_is_derived_from_values_alone(file: Path) -> None:
    plan = plan_run(load_config(file, ["data.batch_size_warmup=[{tokens: 512, global_batch_size: 4}]"]))
    assert (plan.first_step, plan.total_steps, plan.total_tokens) == (0, 10, (4 * 4 + 6 * 8) * 32)
    assert plan.lr_after(0) == plan.settings.lr == 1e-3
    assert plan.lr_after(plan.total_tokens) == pytest.approx(0.0, abs=1e-12)
    assert {row.name for row in plan.rows} > {"model.embed_tokens.weight", "lm_head.weight"}


def test_a_plan_has_the_tensors_of_the_objective(file: Path) -> None:
    plain, registers = (plan_run(load_config(file, given)) for given in ([], ["objective.name=registers"]))
    assert {row.name for row in registers.rows} > {row.name for row in plain.rows}


@pytest.mark.parametrize(
    ("below", "override", "warmup"),
    [
        ("warmup: 40 steps", "schedule.warmup=2%", "2%"),
        ("warmup: 2%", "schedule.warmup=40steps", "40 steps"),
        ("warmup: '${train.steps} steps'", "train.steps=7", "7 steps"),
        ("warmup: 0.299 fraction", "schedule.cooldown=square", "29.9%"),
    ],
)
def test_a_duration_is_replaced_whole_whatever_its_unit(file: Path, below: str, override: str, warmup: str) -> None:
    file.write_text(f"{file.read_text()}\nschedule: {{{below}}}\n")
    assert str(load_config(file, [override]).schedule.warmup) == warmup


def test_a_length_in_another_unit_takes_the_one_below_away(file: Path) -> None:
    train = load_config(file, ["train.tokens=1000"]).train
    assert (train.steps, train.tokens) == (None, 1000)
    file.write_text(f"{file.read_text()}\nschedule: {{branch: {{checkpoint: here, fraction: 0.5}}}}\n")
    branch = load_config(file, ["schedule.branch.steps=7"]).schedule.branch
    assert branch is not None
    assert branch.length == Duration(7, "steps")


def test_two_lengths_of_one_duration_are_refused_where_they_are_written(file: Path) -> None:
    assert problems(file, "train.steps=10", "train.tokens=99")[1:] == [
        "  train.steps = 10, tokens = 99: give one of them"
    ]


def test_missing_sections_are_named(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("run: {name: x}\n")
    missing = {line.split(":")[0].strip() for line in problems(path)[1:]}
    assert missing == {"model", "parameterization", "data", "optimizer", "train"}


def test_documents_that_are_packed_do_not_see_each_other_unless_asked(tiny_config: Path) -> None:
    packed = ["data.packing=best_fit"]
    assert not load_config(tiny_config, []).model.document_mask
    config = load_config(tiny_config, packed)
    assert config.model.document_mask
    assert not any("data.packing" in caution for caution in cautions(config, plan_run(config)))
    unmasked = load_config(tiny_config, [*packed, "model.document_mask=false"])
    assert not unmasked.model.document_mask
    assert any("documents of a sample" in caution for caution in cautions(unmasked, plan_run(unmasked)))


def test_vocabulary_and_context_come_from_the_data(tiny_config: Path, corpus: Path) -> None:
    config = load_config(tiny_config, [])
    assert config.model.vocab_size == json.loads((corpus / "corpus.json").read_text())["vocab_size"] == 257
    assert config.model.max_position_embeddings == config.data.sequence_length == 32
    assert load_config(tiny_config, ["model.vocab_size=300"]).model.vocab_size == 300, "a given value stays"


def test_a_missing_corpus_is_said_where_it_matters(tiny_config: Path, corpus: Path) -> None:
    (line,) = problems(tiny_config, f"data.train=[{{path: {corpus.parent}/nowhere}}]")
    assert line.startswith(f"data.train.0.path = {corpus.parent}/nowhere: holds no readable corpus.json")
    assert f"corpora beside it: {corpus}" in line
    assert "launcher/prepare.py" in line


def test_steps_follow_from_tokens(file: Path) -> None:
    per_step = 8 * 32
    assert plan_run(load_config(file, [])).total_steps == 10
    for tokens, steps in ((1, 1), (per_step, 1), (per_step + 1, 2), (10 * per_step, 10)):
        config = load_config(file, [f"train.tokens={tokens}"])
        assert (plan_run(config).total_steps, config.data.batch_plan.tokens_per_step) == (steps, per_step)


def test_differences_name_each_leaf(file: Path) -> None:
    old = load_config(file, [])
    new = load_config(file, ["optimizer.lr=0.5", "data.train=[{path: there}]", "model.norm=layernorm"])
    model, path, lr = differences(old, new)
    assert (model, lr) == ("model.norm: 'rmsnorm' -> 'layernorm'", "optimizer.lr: 0.001 -> 0.5")
    assert path == "data.train.0.path: 'nowhere' -> 'there'"
    assert differences(old, old) == []


OTHERS = {"sweeps", "harness"}  # folders whose files are no runs
RUNS = sorted(path for path in (REPOSITORY / "configs").rglob("*.yaml") if path.parent.name not in OTHERS)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_configuration_in_the_repository_loads(path: Path, tmp_path: Path) -> None:
    """Its parameterization gives a table of every tensor; its corpus need not be here."""
    config = load_config(path, ["model.vocab_size=50304"], min)
    rows = plan_run(config).rows
    assert len(rows) > 4 * config.model.num_hidden_layers
    assert all(row.lr > 0 and row.eps > 0 and row.weight_decay >= 0 and row.count > 0 for row in rows)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml", []) == config
