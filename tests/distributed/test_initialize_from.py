"""Runs that start from a Hugging Face folder: its function before the first step, under every way to shard; resumes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from plumbline.data.damage import DamagedFileError
from plumbline.data.tokenizer_making import build_tokenizer
from plumbline.launcher.runtime.checkpoint.resume import check_resume
from plumbline.launcher.runtime.checkpoint.store import CheckpointError
from plumbline.launcher.runtime.cluster.slurm import Request
from plumbline.launcher.runtime.config.load import as_yaml, load_config
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.export.hugging_face import export
from plumbline.launcher.runtime.models import from_stock as initial_weights
from plumbline.launcher.runtime.models.open import load_model
from plumbline.launcher.runtime.run.inputs import Inputs, open_inputs
from plumbline.launcher.runtime.train.submission import check as check_job
from plumbline.model.decoder import CausalLM
from plumbline.model.parameterization.multipliers import multipliers
from tests.distributed.conftest import whole_weights
from tests.distributed.trainers import make_trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from plumbline.launcher.runtime.ranks.world import World
    from tests.conftest import Start

STILL = ["optimizer.lr=1.0e-12", "schedule.warmup=0steps", "train.eval_interval=null", "checkpoint.interval=1"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tiny_config: Path, world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export three steps of training: a stock Qwen3."""
    root = tmp_path_factory.mktemp("source")
    config = load_config(tiny_config, [f"run.root={root}"])
    inputs = open_inputs(config, world)
    trainer = make_trainer(config, inputs, world)
    for step in range(3):
        trainer._advance(trainer.engine.train_step(inputs.train.micro_batches(step), step, 4e-3), 4e-3)
    trainer.saver.save(trainer.state)
    export(load_model(root / "tiny", CPU), root / "exported", "auto")
    return root / "exported"


@pytest.fixture(scope="module")
def without_model(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the configuration of all tests without its model section, in fp32."""
    values = yaml.safe_load(tiny_config.read_text(encoding="utf-8"))
    del values["model"]
    file = tmp_path_factory.mktemp("continued") / "continued.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return file


@torch.no_grad()
def logits_of(module: Any) -> Tensor:
    tokens = torch.randint(250, (2, 32), generator=torch.Generator().manual_seed(3))
    found: Tensor = module(tokens) if isinstance(module, CausalLM) else module(input_ids=tokens).logits
    return found


def difference(weights: Mapping[str, Tensor], config: Config, folder: Path) -> float:
    """Return the largest difference of the decoder's logits to the folder's, relative to the largest logit."""
    model = CausalLM(config.model, multipliers(config.model, config.parameterization)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    expected = logits_of(load_model(folder, CPU).module)
    return ((logits_of(model) - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize(("stage", "base"), [(0, 16), (1, 32), (3, 16)])
def test_a_run_starts_as_the_function_of_the_folder(
    folder: Path, without_model: Path, world: World, stage: int, base: int
) -> None:
    """Also under another base than the folder was trained with: other multipliers, the same function."""
    options = [f"train.initialize_from={folder}", f"parameterization.base_hidden_size={base}"]
    config = load_config(without_model, [*options, f"deepspeed.zero_stage={stage}"])
    assert (config.model.hidden_size, config.model.num_key_value_heads, config.model.family) == (64, 1, "qwen3")
    initial_weights.check(config)
    engine = DeepSpeedEngine(config, world, initial_weights.initial_weights(config))
    assert difference(whole_weights(engine), config, folder) <= 1e-5


def test_stretched_positions_come_with_the_folder(without_model: Path, tmp_path: Path) -> None:
    """As those of Llama 3.2: with the model section left out, and with one that says the same."""
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4, "low_freq_factor": 0.5, "high_freq_factor": 2}
    stock = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        rope_parameters={**rope, "original_max_position_embeddings": 12},
    )
    LlamaForCausalLM(stock).save_pretrained(tmp_path / "llama")
    options = [f"train.initialize_from={tmp_path / 'llama'}", "parameterization.base_hidden_size=16"]
    config = load_config(without_model, options)
    assert config.model.rope_scaling is not None
    initial_weights.check(config)
    weights = initial_weights.initial_weights(config)
    assert weights is not None
    assert difference(weights, config, tmp_path / "llama") <= 1e-5
    (tmp_path / "whole.yaml").write_text(as_yaml(config), encoding="utf-8")
    initial_weights.check(load_config(tmp_path / "whole.yaml", []))
    with pytest.raises(ValueError, match=r"model.rope_scaling: None, there \{'rope_type': 'llama3', 'factor': 4"):
        initial_weights.check(load_config(tmp_path / "whole.yaml", ["model.rope_scaling=null"]))


def test_the_thoughts_of_an_export_are_not_taken_for_weights(folder: Path, without_model: Path, tmp_path: Path) -> None:
    """Published folders have other files, too: consolidated.safetensors holds the weights once more."""
    source = tmp_path / "thinks"
    shutil.copytree(folder, source)
    for name in ("lookahead.safetensors", "consolidated.safetensors"):
        save_file({"gain": torch.ones(1)}, source / name)
    weights, expected = (
        initial_weights.initial_weights(load_config(without_model, [f"train.initialize_from={each}"]))
        for each in (source, folder)
    )
    assert weights is not None
    assert expected is not None
    assert weights.keys() == expected.keys()


def test_a_run_that_thinks_starts_with_the_thinker_of_the_folder_or_says_that_it_does_not(
    folder: Path, without_model: Path, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The gain stays below its start of 1, which a run would draw."""
    source = tmp_path / "thinks"
    shutil.copytree(folder, source)
    tensors = {"role": torch.linspace(-1, 1, 64), "gain": torch.tensor([0.01])}
    save_file(tensors, source / "lookahead.safetensors", {"settings": json.dumps({"norm_eps": None})})
    begin = [f"train.initialize_from={source}", "model.initializer_range=0.02"]
    thinks = "objective.name=latent_lookahead"
    config = load_config(without_model, [*begin, thinks])
    weights = whole_weights(DeepSpeedEngine(config, world, initial_weights.initial_weights(config)))
    assert torch.equal(weights["objective.thinker.role"], tensors["role"])
    assert weights["objective.thinker.gain"].item() == pytest.approx(0.5)
    assert f"thoughts from {source}/lookahead.safetensors\n" in capsys.readouterr().out
    for other in ([thinks, "objective.growth=fixed"], ["objective.name=registers"], ["objective.name=coconut"]):
        found = initial_weights.initial_weights(load_config(without_model, [*begin, *other]))
        assert found is not None
        assert not any(name.startswith("objective.") for name in found)
        assert " adds starts anew: " in capsys.readouterr().out
    (source / "lookahead.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"lookahead\.safetensors: cannot be read"):
        initial_weights.initial_weights(config)


def test_documents_stay_apart_as_the_folder_says_unless_the_run_says_otherwise(
    folder: Path, without_model: Path, tmp_path: Path
) -> None:
    source = tmp_path / "masked"
    shutil.copytree(folder, source)
    entries = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (source / "config.json").write_text(json.dumps(entries | {"document_mask": True}), encoding="utf-8")
    begin = [f"train.initialize_from={source}", f"run.root={tmp_path}"]
    for more, masks in (([], True), (["model.document_mask=false"], False)):
        config = load_config(without_model, [*begin, *more])
        initial_weights.check(config)
        assert config.model.document_mask is masks


def test_pruning_may_be_learned_on_top(folder: Path, without_model: Path, world: World) -> None:
    """The votes are drawn, and at first keep everything."""
    typed = [f"train.initialize_from={folder}", "model.attention=pruned", "model.pruning_rank=8"]
    config = load_config(without_model, typed)
    initial_weights.check(config)
    engine = DeepSpeedEngine(config, world, initial_weights.initial_weights(config))
    weights = whole_weights(engine)
    assert weights["model.layers.0.self_attn.ask_proj.weight"].abs().max() > 0
    assert difference(weights, config, folder) <= 1e-5


def test_two_ranks_start_there_and_a_resume_does_not_need_the_folder(
    folder: Path, without_model: Path, start_pretrain: Start, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(folder, source)
    settings = [f"train.initialize_from={source}", "deepspeed.zero_stage=3", *STILL]
    first = start_pretrain(
        without_model, "continued", [*settings, "train.steps=1", "schedule.warmup=0steps"], ranks=2
    ).wait()
    assert first.code == 0, first.stderr
    assert f"weights  from {source}" in first.stdout
    config_file = first.run.folder / "config.yaml"
    config = load_config(config_file, [])
    assert difference(first.run.weights(1), config, folder) <= 1e-5
    shutil.rmtree(source)
    # The run's own configuration is complete: nothing has to be looked up
    again = start_pretrain(config_file, "continued", ["train.steps=2", f"run.root={first.run.folder.parent}"], ranks=2)
    ended = again.wait()
    assert ended.code == 0, ended.stderr
    assert "resuming after step 1" in ended.stdout
    weights = first.run.weights(2)
    assert difference(weights, config, folder) <= 1e-5


def test_a_resume_from_another_start_is_refused(folder: Path, tiny_config: Path, world: World) -> None:
    run = folder.parent / "tiny"
    found = run / "checkpoints" / "step_00000003"
    old = load_config(found / "config.yaml", [])
    new = load_config(tiny_config, [f"train.initialize_from={folder}"])
    with pytest.raises(CheckpointError, match=r"train.initialize_from: None -> '.*exported'"):
        check_resume(old, new, open_inputs(old, world).fingerprints, found)


def test_a_model_section_that_differs_is_named_key_by_key(folder: Path, tiny_config: Path, tmp_path: Path) -> None:
    options = [f"train.initialize_from={folder}", f"run.root={tmp_path}"]
    initial_weights.check(load_config(tiny_config, [*options, "model.max_position_embeddings=4096"]))
    changes = ["model.intermediate_size=128", "model.attention_bias=true", "model.block=norm_free"]
    with pytest.raises(ValueError, match="is another model") as caught:
        initial_weights.check(load_config(tiny_config, [*options, *changes]))
    lines = str(caught.value).splitlines()[1:]
    assert sorted(lines) == [
        "  model.attention_bias: True, there False",
        "  model.block: 'norm_free', there 'pre_norm'",
        "  model.intermediate_size: 128, there 96",
    ]


def test_a_part_of_the_shape_is_compared_and_the_rest_taken_over(folder: Path, without_model: Path) -> None:
    start, width = f"train.initialize_from={folder}", load_config(without_model, [f"train.initialize_from={folder}"])
    config = load_config(without_model, [start, f"model.hidden_size={width.model.hidden_size}"])
    assert config.model == width.model
    with pytest.raises(ValueError, match=r"is another model.*\n  model\.hidden_size: 16, there \d+$"):
        initial_weights.check(load_config(without_model, [start, "model.hidden_size=16"]))


def test_what_does_not_go_with_the_folder_s_model_names_the_folder(
    without_model: Path, tmp_path: Path, world: World
) -> None:
    """Its vocabulary and its context are nobody's to choose."""
    small = tmp_path / "small"
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 48}
    LlamaConfig(vocab_size=9, max_position_embeddings=8, **shape).save_pretrained(small)
    start = f"train.initialize_from={small}"
    place = r"continued\.yaml with its overrides, with the model of .*small"
    with pytest.raises(ValueError, match=rf"{place}: 1 problem.*\n.* = 8: raise it"):
        load_config(without_model, [start])
    config = load_config(without_model, [start, "model.max_position_embeddings=64"])
    with pytest.raises(ValueError, match=r"model\.vocab_size = 9 .* it is that of .*small; prepare the corpus with"):
        open_inputs(config, world)


def without(tensor: str) -> Callable[[Path], None]:
    """Take a tensor out of a folder."""

    def harm(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        del weights[tensor]
        save_file(weights, folder / "model.safetensors")

    return harm


def overflown(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, :2] = -torch.inf
    save_file(weights, folder / "model.safetensors")


def become_a_run(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "checkpoints").mkdir()


def become_a_checkpoint(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.yaml").touch()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (overflown, r"model\.safetensors: model\.layers\.1\.mlp\.up_proj\.weight: 2 of \d+ values are nan or inf"),
        (lambda path: (path / "config.json").unlink(), "not a Hugging Face folder"),
        (become_a_run, r"not a Hugging Face folder \(no config.json\); it is of a run: .*export.py --model"),
        (become_a_checkpoint, r"not a Hugging Face folder \(no config.json\); it is of a run: .*export.py --model"),
        (shutil.rmtree, "no such folder"),
        (lambda path: (path / "config.json").write_text('{"model_type": "mistral"}'), "model_type = mistral: only"),
        (lambda path: (path / "model.safetensors").unlink(), r"holds no model\*\.safetensors"),
        (without("model.layers.0.mlp.down_proj.weight"), "'model.layers.0.mlp.down_proj.weight' is missing"),
        (without("model.layers.1.mlp.up_proj.weight"), "has other tensors: model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_a_folder_that_cannot_be_read_is_one_clear_error(
    folder: Path, tiny_config: Path, tmp_path: Path, harm: Callable[[Path], object], message: str
) -> None:
    source = tmp_path / "damaged"
    shutil.copytree(folder, source)
    harm(source)
    config = load_config(tiny_config, [f"train.initialize_from={source}", f"run.root={tmp_path}"])

    def begin() -> None:
        initial_weights.check(config)
        initial_weights.initial_weights(config)

    with pytest.raises(ValueError, match=message) as caught:
        begin()
    assert str(caught.value).startswith(f"train.initialize_from = {source}")


def leave_it(_folder: Path) -> None:
    """Change nothing."""


def add_a_token(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def take_none(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def take_another(folder: Path) -> None:
    build_tokenizer("train-bpe:300", ["the same words, and again the same words"] * 9, folder / "other")
    for file in (folder / "other").iterdir():
        file.replace(folder / file.name)


def damage_it(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def lose_the_vocabulary(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.fixture
def tokenizer_changed(
    folder: Path, tiny_config: Path, tmp_path: Path, world: World
) -> Callable[[Callable[[Path], object]], tuple[Config, Inputs]]:
    """Start from a copy of the folder with the tokenizer of the corpora, once that is changed."""

    def start(change: Callable[[Path], object]) -> tuple[Config, Inputs]:
        config = load_config(tiny_config, [f"train.initialize_from={tmp_path / 'source'}", f"run.root={tmp_path}"])
        inputs = open_inputs(config, world)
        shutil.copytree(folder, tmp_path / "source")
        own = inputs.train.corpora["email"].tokenizer_path
        assert own is not None
        shutil.copytree(own, tmp_path / "source", dirs_exist_ok=True)
        change(tmp_path / "source")
        return config, inputs

    return start


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        (leave_it, ""),
        (add_a_token, ""),
        (take_none, ""),
        (damage_it, "whether the corpora were made with its tokenizer cannot be told"),
        (lose_the_vocabulary, "whether the corpora were made with its tokenizer cannot be told"),
    ],
)
def test_a_corpus_goes_with_a_folder_whose_tokenizer_reads_text_alike(
    tokenizer_changed: Callable[..., tuple[Config, Inputs]],
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path], object],
    warning: str,
) -> None:
    initial_weights.check_tokenizer(*tokenizer_changed(change))
    told = capsys.readouterr().err
    assert warning in told
    assert bool(told) == bool(warning)


def test_a_corpus_of_another_tokenizer_is_refused_until_the_run_has_weights_of_its_own(
    tokenizer_changed: Callable[..., tuple[Config, Inputs]],
) -> None:
    config, inputs = tokenizer_changed(take_another)
    with pytest.raises(ValueError, match=r"its tokenizer reads 'A fox, .* prepare them with --tokenizer .*/source$"):
        initial_weights.check_tokenizer(config, inputs)
    with pytest.raises(ValueError, match="its tokenizer reads"):
        check_job(config, Request(tasks_per_node=1))
    (config.run.folder / "checkpoints" / "step_old").mkdir(parents=True)
    with pytest.raises(ValueError, match="its tokenizer reads"):
        initial_weights.check_tokenizer(config, inputs)
    (config.run.folder / "checkpoints" / "step_00000001").mkdir()
    initial_weights.check_tokenizer(config, inputs)


def test_a_name_of_the_hub_is_looked_up_there(
    folder: Path, tiny_config: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a network: a hub's cache that holds the model."""
    snapshots = tmp_path / "models--someone--tiny" / "snapshots" / "0123"
    shutil.copytree(folder, snapshots)
    (snapshots.parent.parent / "refs").mkdir()
    (snapshots.parent.parent / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = load_config(tiny_config, ["train.initialize_from=hf:someone/tiny", f"run.root={tmp_path}"])
    initial_weights.check(config)
    check_job(config, Request(tasks_per_node=1))
    weights = initial_weights.initial_weights(config)
    assert weights is not None
    assert difference(weights, config, folder) <= 1e-5
    (snapshots / "model.safetensors").unlink()  # what a look at the configuration alone leaves here
    words = r"hf:someone/tiny: not downloaded: .*holds no model\*\.safetensors, and the hub cannot be reached"
    with pytest.raises(ValueError, match=words):
        check_job(config, Request(tasks_per_node=1))
    with pytest.raises(DamagedFileError, match=words):
        initial_weights.fetch(config, world)
