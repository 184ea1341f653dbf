"""The precision section: what it says and refuses, and what a run trained with it is afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.config.budget import totals
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.load import load_config, save_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.engine.activations import activation_bytes
from plumbline.launcher.runtime.export.hugging_face import export
from plumbline.launcher.runtime.models.open import load_model
from plumbline.launcher.runtime.sweep.plan import make_plan
from plumbline.launcher.runtime.sweep.results import describe, read_results
from plumbline.model.attention import ATTENTIONS
from plumbline.model.decoder import CausalLM
from plumbline.model.parameterization.multipliers import Multipliers
from plumbline.model.quantization.precision import apply_precision

if TYPE_CHECKING:
    from tests.conftest import Command, Pretrain, Run

SHORT = ["train.steps=6", "train.eval_interval=null", "checkpoint.keep_last=9", "checkpoint.interval=3"]
JOINT = ["precision.weights=4", "precision.activations=6", "precision.kv_cache=nvfp4", "deepspeed.zero_stage=3"]
CPU = torch.device("cpu")


def train(run_pretrain: Pretrain, config: Path, name: str, overrides: list[str]) -> Run:
    outcome = run_pretrain(config, name, [*SHORT, *overrides], launcher="python")
    assert outcome.code == 0, outcome.stderr
    return outcome.run


@pytest.fixture(scope="module")
def joint(run_pretrain: Pretrain, tiny_config: Path) -> Run:
    """Round everything."""
    return train(run_pretrain, tiny_config, "joint", JOINT)


@pytest.fixture(scope="module")
def weights_alone(run_pretrain: Pretrain, tiny_config: Path) -> Run:
    """Round weights to three bits, with every multiplier away from 1."""
    options = ["precision.weights=3", "parameterization.base_hidden_size=16", "parameterization.output_multiplier=2.0"]
    return train(run_pretrain, tiny_config, "weights_alone", options)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ([], "nothing rounded"),
        (["precision.weights=4"], "weights int4 (channel)"),
        (["precision.activations=e4m3", "precision.kv_cache=3"], "activations e4m3 (tensor), kv_cache int3 (tensor)"),
        (["precision.weights=mxfp4"], "weights e2m1 (group of 32, e8m0 scales)"),
        (["precision.kv_cache=mxfp4"], "kv_cache e2m1 (group of 32, e8m0 scales)"),
        (["precision.activations={format: int8, granularity: token}"], "activations int8 (token)"),
        (["precision.float8=rowwise"], "float8 products (rowwise)"),
        (["precision.float8=tensorwise", "precision.float8_emulated=true"], "float8 products (tensorwise, emulated)"),
    ],
)
def test_what_is_rounded_is_said_and_survives_saving(
    tiny_config: Path, tmp_path: Path, typed: list[str], words: str
) -> None:
    config = load_config(tiny_config, typed)
    assert str(config.precision) == words
    assert config.precision.is_plain == (not typed)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml", []) == config


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["weights=1"], r"precision.weights: 'int1' is no number format: give int2 to int16"),
        (["weights={format: int4, granularity: token}"], r"granularity = token: weights have tensor, channel, group$"),
        (
            ["activations={format: int4, granularity: group, group_size: 24}"],
            r"precision.activations: groups of 24 do not divide the 64 values of a row of model.layers.0.self_attn",
        ),
        (
            ["kv_cache={format: int4, granularity: group, group_size: 64}"],
            r"precision.kv_cache: groups of 64 do not divide the 32 values of a row of model.head_dim",
        ),
        (["float8=rowwise", "activations=8"], r"float8 = rowwise rounds weights and activations by itself"),
        (["float8=colwise"], r"precision.float8 = 'colwise'"),
        (["float8_emulated=true"], r"float8_emulated = true: nothing is in float8"),
        (["bits=4"], r"precision.bits = 4: unknown key"),
    ],
)
def test_what_cannot_be_rounded_is_one_clear_error(tiny_config: Path, typed: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        plan_run(load_config(tiny_config, [f"precision.{each}" for each in typed]))
    assert len(str(caught.value).splitlines()) == 2


def test_float8_asks_for_multiples_of_16_and_for_bf16_weights(tiny_config: Path) -> None:
    wanted = ["precision.float8=tensorwise"]
    with pytest.raises(ConfigError, match=r"gate_proj.weight is 100 x 64, and float8 units need multiples of 16"):
        plan_run(load_config(tiny_config, [*wanted, "model.intermediate_size=100"]))
    plan_run(load_config(tiny_config, ["precision.weights=8", "model.intermediate_size=100"]))
    with pytest.raises(ConfigError, match=r"deepspeed.zero_stage = 0 computes in bf16 by autocast"):
        load_config(tiny_config, [*wanted, "deepspeed.precision=bf16", "deepspeed.zero_stage=0"])
    load_config(tiny_config, [*wanted, "deepspeed.precision=bf16"])


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_kinds_of_attention_round_what_they_store_or_refuse(tiny_config: Path, kind: str) -> None:
    typed = ["precision.kv_cache=3", f"model.attention={kind}", "model.qk_norm=none"]
    if kind not in ("softmax", "shaped"):
        with pytest.raises(ConfigError, match=rf"model.attention: softmax or shaped; it is {kind}, so leave kv_cache"):
            plan_run(load_config(tiny_config, typed))
        return
    config, tokens = load_config(tiny_config, typed), torch.arange(20).view(2, 10)
    torch.manual_seed(0)
    model = CausalLM(config.model, Multipliers(attention=0.2)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    with torch.no_grad():
        plain: Any = model(tokens)
        apply_precision(model.model.layers, config.precision)
        rounded: Any = model(tokens)
    assert (rounded - plain).abs().max() > 1e-3


def test_eval_computes_as_the_run_did_at_its_end(joint: Run, command: Command, corpus: Path) -> None:
    """The same batches, or scales of whole tensors would be others."""
    done = command(
        "eval", "--model", joint.folder, "--data", corpus, "--batch-size", "2", "--max-batches", "4", "--json"
    )
    assert done.returncode == 0, done.stderr
    expected = joint.column("eval/email/loss")[6]
    assert json.loads(done.stdout)["loss"] == pytest.approx(expected, rel=1e-6)
    assert "w8a8" not in "".join(key for record in joint.records for key in record), "of what rounds nothing by itself"


def test_every_way_to_open_a_run_rounds(joint: Run, tiny_config: Path) -> None:
    """The newest checkpoint, another, an average, with the objective: none says what unrounded blocks would say."""
    batch = TrainBatches(load_config(tiny_config, []).data, 1).micro_batches(0)[0]
    checkpoint = joint.folder / "checkpoints" / "step_00000003"
    opened = [
        load_model(joint.folder, CPU),
        load_model(checkpoint, CPU),
        load_model(joint.folder, CPU, average="last:2"),
        load_model(joint.folder, CPU, with_objective=True),
    ]
    scores = [model.evaluate(batch).nats for model in opened]
    assert scores[0] == scores[3]
    assert len(set(scores)) == 3
    for model, score in zip(opened, scores, strict=True):
        module: Any = model.module
        assert model.config is not None
        plain = CausalLM(module.config, module.multipliers).eval()
        plain.load_state_dict({k: v for k, v in module.state_dict().items() if not k.startswith("objective.")})
        labels = batch["labels"]
        with torch.no_grad():
            assert abs(plain(batch["input_ids"], labels=labels)[1].item() - score) > 1e-3
            apply_precision(plain.model.layers, model.config.precision)
            assert plain(batch["input_ids"], labels=labels)[1].item() == score


@pytest.mark.parametrize("target", ["auto", "native"])
def test_an_export_holds_the_rounded_weights(weights_alone: Run, tmp_path: Path, target: str) -> None:
    model = load_model(weights_alone.folder, CPU)
    report = export(model, tmp_path / "out", target)
    assert report.relative_error <= 1e-5
    assert "| Rounded | weights int3 (channel), as in training |" in (tmp_path / "out" / "README.md").read_text()
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=target == "native")
    layer = stock.model.layers[0]
    for matrix in (layer.self_attn.q_proj.weight, layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
        assert all(len(row.unique()) <= 7 for row in matrix), "seven values of three bits in each row"
    assert len(stock.get_input_embeddings().weight[65].unique()) > 50, "not the embedding"
    stored = weights_alone.weights(6)["model.layers.0.self_attn.q_proj.weight"]
    assert len(stored[0].unique()) > 50, "and the run keeps what it trains"


@pytest.mark.parametrize("key", ["activations", "kv_cache"])
def test_a_folder_that_would_be_another_model_is_refused(joint: Run, tmp_path: Path, key: str) -> None:
    model = load_model(joint.folder, CPU)
    assert model.config is not None
    other = {"activations": "kv_cache", "kv_cache": "activations"}[key]
    precision = model.config.precision.model_copy(update={other: None})
    model = type(model)(**{**vars(model), "config": model.config.model_copy(update={"precision": precision})})
    with pytest.raises(ValueError, match=rf"precision.{key}: this run rounds them to .*precision.{key}=null"):
        export(model, tmp_path / "out", "auto")
    assert not (tmp_path / "out").exists()


def test_results_of_sweeps_say_what_laws_need(tiny_config: Path, tmp_path: Path) -> None:
    rounded: dict[str, dict[str, Any]] = {
        "none": {},
        "weights": {"precision.weights": 3},
        "activations": {"precision.activations": "int6"},
        "kv": {"precision.kv_cache": 5},
        "joint": {"precision.weights": "e2m1", "precision.activations": 8, "precision.kv_cache": 7},
        "float8": {"precision.float8": "rowwise"},
        "groups": {"precision.weights": {"format": "int4", "granularity": "group", "group_size": 16}},
    }
    file = tmp_path / "sweep.yaml"
    sweep = {"name": "bits", "root": str(tmp_path), "base": str(tiny_config), "grids": [{"axes": {"bits": rounded}}]}
    file.write_text(yaml.safe_dump(sweep))
    cells = make_plan(file, []).cells
    keys = ("weight_bits", "activation_bits", "kv_bits", "weight_format", "group_size")
    assert {cell.labels["bits"]: tuple(getattr(describe(cell), key) for key in keys) for cell in cells} == {
        "none": (16, 16, 16, None, None),
        "weights": (3, 16, 16, "int3", None),
        "activations": (16, 6, 16, None, None),
        "kv": (16, 16, 5, None, None),
        "joint": (4, 8, 7, "e2m1", None),
        "float8": (8, 8, 16, "e4m3", None),
        "groups": (4, 16, 16, "int4", 16),
    }
    assert len({cell.signature for cell in cells}) == 7, "each is a run of its own"
    expected = totals(plan_run(cells[0].config).rows)
    rows = read_results(cells)
    assert {row.parameters for row in rows} == {expected.non_embedding}
    assert expected.non_embedding == expected.total - 2 * 257 * 64
    assert {"tokens", "loss"} <= rows[0].to_json().keys()


def test_plan_says_what_is_rounded(command: Command, tiny_config: Path) -> None:
    done = command("plan", "--config", tiny_config, "precision.weights=4", "precision.kv_cache=8")
    assert done.returncode == 0, done.stderr
    assert "\nprecision   weights int4 (channel), kv_cache int8 (tensor)\n" in done.stdout


@pytest.mark.parametrize(
    "typed",
    [
        ["objective.name=latent_lookahead", "objective.anchors=8"],
        ["objective.name=registers"],
        ["objective.name=multi_token", "objective.horizon=3"],
    ],
)
def test_objectives_take_memory(tiny_config: Path, typed: list[str]) -> None:
    """Slots as tokens do, and blocks of their own as the model's two; N of the scaling laws is the model's alone."""
    config, plain = load_config(tiny_config, typed), load_config(tiny_config, [])
    less, more = (activation_bytes(each, 8, 1, "none", on_gpu=True) for each in (plain, config))
    assert more > 1.5 * less
    assert totals(plan_run(config).rows).non_embedding == totals(plan_run(plain).rows).non_embedding
