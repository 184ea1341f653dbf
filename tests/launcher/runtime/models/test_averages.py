"""`--average`: a run is opened at the mean of its checkpoints or at its moving average, or it is said why not."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import xxhash
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from plumbline.data.damage import DamagedFileError
from plumbline.launcher.runtime.checkpoint import publishing, saved_tensors
from plumbline.launcher.runtime.checkpoint import store as checkpoint
from plumbline.launcher.runtime.checkpoint.saved_tensors import SavedTensors
from plumbline.launcher.runtime.checkpoint.store import CheckpointError
from plumbline.launcher.runtime.checkpoint.tensors import AVERAGE, mean_model, read_model, shard_name
from plumbline.launcher.runtime.checkpoint.weights import TensorFile
from plumbline.launcher.runtime.config.budget import ParameterCount
from plumbline.launcher.runtime.config.load import as_yaml, load_config, save_config
from plumbline.launcher.runtime.engine.memory import model_states
from plumbline.launcher.runtime.export.hugging_face import export
from plumbline.launcher.runtime.models.facts import outline
from plumbline.launcher.runtime.models.open import LoadedModel, load_model
from plumbline.launcher.runtime.ranks import collectives
from plumbline.launcher.runtime.ranks.world import World
from plumbline.model.decoder import CausalLM

if TYPE_CHECKING:
    from tests.conftest import Command, Pretrain

OVERRIDES = [
    "train.steps=4",
    "train.ema_half_life_tokens=1000",
    "checkpoint.interval=1",
    "checkpoint.keep_last=3",
    "parameterization.base_hidden_size=16",
]


@pytest.fixture(scope="module")
def trained(run_pretrain: Pretrain, tiny_config: Path) -> Path:
    """Return a finished run with checkpoints of steps 2, 3 and 4."""
    outcome = run_pretrain(tiny_config, "averaged", OVERRIDES, launcher="python")
    assert outcome.code == 0, outcome.stderr
    assert "average  moving, half-life 1,000 tokens = 3.9 steps" in outcome.stdout
    return Path(outcome.run.folder)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """Return a copy to damage."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def step(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"step_{number:08d}"


def opened(path: Path, average: str | None) -> LoadedModel:
    return load_model(path, torch.device("cpu"), average=average)


def mean(run: Path, *steps: int) -> dict[str, Tensor]:
    """Average by hand."""
    states = [read_model(step(run, number)) for number in steps]
    return {name: torch.stack([s[name].double() for s in states]).mean(0).float() for name in states[0]}


def assert_holds(model: LoadedModel, expected: dict[str, Tensor]) -> None:
    found = dict(model.module.named_parameters())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("place", "average", "steps"),
    [
        ("", "last:1", [4]),
        ("", "last:2", [3, 4]),
        ("", "last:3", [2, 3, 4]),
        ("checkpoints/step_00000003", "last:2", [2, 3]),
        ("", "steps:4,2", [2, 4]),
        ("checkpoints/step_00000002", "steps:3,4,3", [3, 4]),
    ],
)
def test_the_mean_of_checkpoints(trained: Path, place: str, average: str, steps: list[int]) -> None:
    model = opened(trained / place, average)
    assert_holds(model, mean(trained, *steps))
    names = ", ".join(f"step_{number:08d}" for number in steps)
    assert model.average == (f"mean of {names}" if len(steps) > 1 else None)
    assert (model.source.name, model.step, model.tokens) == (f"step_{steps[-1]:08d}", steps[-1], 256 * steps[-1])
    assert model.tokenizer_path is not None
    if len(steps) > 1:
        newest = read_model(step(trained, steps[-1]))
        assert not torch.equal(newest["lm_head.weight"], model.module.get_parameter("lm_head.weight"))


@pytest.mark.parametrize("number", [3, 4])
def test_the_moving_average_of_a_checkpoint(trained: Path, number: int) -> None:
    model = opened(trained if number == 4 else step(trained, number), "ema")
    assert_holds(model, read_model(step(trained, number), AVERAGE))
    assert (model.step, model.average) == (number, "exponential moving average, half-life 1,000 tokens")
    weights_of_step = read_model(step(trained, number))
    assert not torch.equal(weights_of_step["lm_head.weight"], model.module.get_parameter("lm_head.weight"))


@pytest.mark.parametrize(
    ("average", "message"),
    [
        ("last:4", "holds 3 checkpoint(s) up to step 4; average fewer, or train with a larger checkpoint.keep_last"),
        ("steps:1,4", "has no checkpoint of step 1; it has [2, 3, 4]"),
        ("last:0", "unknown; known: ema, last:5, steps:800,900,1000"),
        ("lawa", "unknown; known: ema, last:5, steps:800,900,1000"),
        ("last:2,3", "unknown; known: ema, last:5, steps:800,900,1000"),
    ],
)
def test_what_the_run_does_not_have_is_refused(trained: Path, average: str, message: str) -> None:
    with pytest.raises(ValueError, match="--average ") as caught:
        opened(trained, average)
    assert str(caught.value).startswith(f"--average {average}: ")
    assert message in str(caught.value)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_damaged_part_of_a_mean_is_refused(run: Path) -> None:
    flip(step(run, 3) / shard_name(0))
    with pytest.raises(ValueError, match=r"^--average last:3: .*step_00000003 is damaged: .*leave it out") as caught:
        opened(run, "last:3")
    assert not isinstance(caught.value, CheckpointError)
    assert_holds(opened(run, "steps:2,4"), mean(run, 2, 4))


def test_a_damaged_newest_checkpoint_is_passed_over(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As without an average: the mean is that of the newest whole checkpoint and the ones before it."""
    flip(step(run, 4) / shard_name(0))
    assert_holds(opened(run, "last:2"), mean(run, 2, 3))
    assert "step_00000004 cannot be used" in capsys.readouterr().err
    assert opened(run, "ema").step == 3


def test_a_damaged_configuration_is_warned_of_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (step(run, 4) / checkpoint.CONFIG).write_text("")
    assert outline(run).source == step(run, 3), "what is checked before weights are read"
    assert opened(run, None).source == step(run, 3)
    assert capsys.readouterr().err.count("passed over") == 1
    for number in (2, 3):
        (step(run, number) / checkpoint.CONFIG).write_text("")
    with pytest.raises(ValueError, match="holds no whole checkpoint"):
        outline(run)
    assert capsys.readouterr().err.count("passed over") == 3, "why none is whole"


def test_a_run_without_moving_average_is_told_the_key(tiny_config: Path, tmp_path: Path) -> None:
    config = as_yaml(load_config(tiny_config, []))
    write_checkpoint(tmp_path / "checkpoints", 4, {"x": torch.zeros(1)}, config=config)
    with pytest.raises(ValueError, match=r"step_00000004 has no moving average; train with train.ema_half_life_tokens"):
        opened(tmp_path, "ema")


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("model.rope_theta=5.0", "rope_theta: 10000.0 -> 5.0"),
        ("parameterization.base_hidden_size=32", "base_hidden_size: 16 -> 32"),
        ("precision.weights=4", "weights.format: None -> 'int4'"),
    ],
)
def test_checkpoints_of_another_model_are_not_averaged(run: Path, key: str, line: str) -> None:
    file = step(run, 2) / "config.yaml"
    config = load_config(file, [key])
    save_config(config, file)
    facts = {"bytes": file.stat().st_size, "xxh3": xxhash.xxh3_64_hexdigest(file.read_bytes())}
    rewrite(step(run, 2), lambda files: {**files, "config.yaml": facts})
    with pytest.raises(ValueError, match=r"step_00000002 is of another model: ") as caught:
        opened(run, "last:3")
    assert line in str(caught.value)
    assert opened(run, "last:2").step == 4


def rewrite(folder: Path, change: Any) -> None:
    """Change what a manifest says about files, so that it still vouches for itself."""
    manifest = checkpoint.read_manifest(folder)
    manifest["files"] = change(manifest["files"])
    manifest["checksum"] = checkpoint.manifest_checksum(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_evaluating_and_sampling_an_average(command: Command, trained: Path, corpus: Path) -> None:
    options = ("--data", corpus, "--max-batches", "4", "--batch-size", "2", "--average", "ema", "--json")
    facts = json.loads(command("eval", "--model", trained, *options).stdout)
    result = json.loads((trained / "result.json").read_text())
    assert facts["loss"] == pytest.approx(result["eval/email/ema_loss"], rel=1e-6)
    assert facts["loss"] != pytest.approx(result["eval/email/loss"], rel=1e-4)
    assert facts["average"] == "exponential moving average, half-life 1,000 tokens"

    sampled = command("generate", "--model", trained, "--average", "last:2", "--max-new-tokens", "3", "--json")
    assert json.loads(sampled.stdout)["average"] == "mean of step_00000003, step_00000004"


def test_an_exported_average_reloads_and_has_no_scores_of_the_run(
    command: Command, trained: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    done = command("export", "--model", trained, "--average", "last:3", "--output", output)
    assert done.returncode == 0, done.stderr
    assert "mean of step_00000002, step_00000003, step_00000004" in done.stdout
    ours = opened(trained, "last:3").module
    stock = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval()
    tokens = torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected, found = ours(tokens), stock(input_ids=tokens).logits
    assert isinstance(ours, CausalLM)
    assert ((found - expected).abs().max() / expected.abs().max()).item() <= 1e-5
    card = (output / "README.md").read_text()
    assert "| Weights | mean of step_00000002, step_00000003, step_00000004 |" in card
    assert "email/loss" not in card

    with pytest.raises(ValueError, match="is a Hugging Face folder; give a run or a checkpoint"):
        opened(output, "ema")


@pytest.mark.parametrize(("number", "scored"), [(4, True), (2, False)])
def test_only_the_last_checkpoint_is_exported_with_scores_of_the_run(
    trained: Path, tmp_path: Path, number: int, scored: bool
) -> None:
    export(load_model(step(trained, number), torch.device("cpu")), tmp_path / "out", "auto")
    assert ("| email/loss |" in (tmp_path / "out" / "README.md").read_text()) == scored


def write_checkpoint(root: Path, step: int, model: dict[str, Tensor], ranks: int = 1, config: str = "") -> Path:
    """Publish a checkpoint with nothing but weights, each cut evenly over ranks."""
    staging = publishing.staging_folder(root, step)
    publishing.make_room(staging)
    files = publishing.write_files({checkpoint.CONFIG: config}, staging, checkpoint.silent)
    for rank in range(ranks):
        tensors, index = {}, {}
        for name, tensor in model.items():
            parts = tensor.flatten().tensor_split(ranks)
            start = sum(part.numel() for part in parts[:rank])
            index[name] = {"shape": tensor.shape, "start": start, "whole": [], "numbers": {}}
            if parts[rank].numel():
                tensors[f"weight/{name}"] = parts[rank]
        file = TensorFile(tensors, {"index": json.dumps(index)})
        files |= publishing.write_files({shard_name(rank): file}, staging, checkpoint.silent)
    return publishing.publish(staging, {"step": step}, files)


def test_the_mean_is_rounded_once(tmp_path: Path) -> None:
    """In fp32 the small terms would be lost one after the other."""
    folders = [
        write_checkpoint(tmp_path, step, {"x": torch.tensor([value])})
        for step, value in enumerate([2.0**24, 1.0, 1.0, 0.0])
    ]
    assert mean_model(folders)["x"].item() == (2.0**24 + 2) / 4


def test_weights_of_several_ranks_are_read_and_averaged(tmp_path: Path) -> None:
    """Written by three ranks and by two, of tensors of which some ranks hold nothing."""
    models, folders = [], []
    for step, ranks in ((1, 3), (2, 2)):
        generator = torch.Generator().manual_seed(step)
        shapes = {"a": (4, 2), "b": (5,), "c": (1,), "d": (3, 7)}
        models.append({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()})
        folders.append(write_checkpoint(tmp_path, step, models[-1], ranks))
        found = read_model(folders[-1])
        assert found.keys() == shapes.keys()
        assert all(torch.equal(found[name], models[-1][name]) for name in shapes)
    found = mean_model(folders)
    assert all(torch.equal(found[n], ((models[0][n].double() + models[1][n]) / 2).float()) for n in found)


def test_a_range_comes_from_whichever_files_hold_it(tmp_path: Path) -> None:
    values = torch.arange(10.0)
    folder = write_checkpoint(tmp_path, 1, {"x": values.view(2, 5)}, ranks=3)
    with SavedTensors(folder) as saved:
        for start in range(10):
            for length in range(11 - start):
                assert torch.equal(saved.read("weight", "x", start, length), values[start : start + length])
        with pytest.raises(CheckpointError, match=r"lacks 2 of 4 elements of weight of x"):
            saved.read("weight", "x", 8, 4)
        with pytest.raises(CheckpointError, match=r"lacks 10 of 10 elements of ema of x"):
            saved.tensor("ema", "x")


def test_many_ranks_open_no_file_each_that_they_do_not_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values, size = torch.arange(12.0), 2
    folder = write_checkpoint(tmp_path, 1, {"x": values.view(3, 4)}, ranks=4)
    told: list[object] = [None] * size
    all_here = threading.Barrier(size, timeout=60)
    opened: list[str] = []

    def gather(value: object, world: World) -> list[object]:
        told[world.rank] = value
        all_here.wait()
        found = list(told)
        all_here.wait()
        return found

    def open_file(path: Path, framework: str) -> object:
        opened.append(path.name)
        return safe_open(path, framework=framework)

    def read_all() -> list[dict[str, saved_tensors.Header]]:
        worlds = [World(rank, 0, size, torch.device("cpu")) for rank in range(size)]
        with ThreadPoolExecutor(size) as ranks:
            return list(ranks.map(lambda world: saved_tensors.read_headers_together(folder, world), worlds))

    for module in (saved_tensors, collectives):
        monkeypatch.setattr(module, "gather_objects", gather)
    monkeypatch.setattr(saved_tensors, "safe_open", open_file)
    one, other = read_all()
    assert one == other
    assert sorted(opened) == [Path(shard_name(rank)).name for rank in range(4)], "each by one of the two"
    opened.clear()
    with SavedTensors(folder, other) as saved:
        assert torch.equal(saved.read("weight", "x", 4, 2), values[4:6])
    assert opened == ["rank_00001.safetensors"]
    (folder / shard_name(3)).write_bytes(b"cut")
    with pytest.raises(DamagedFileError, match=r"rank_00003\.safetensors: cannot be read"):
        read_all()
    assert all_here.n_waiting == 0, "both heard of it"


def test_a_half_life_of_less_than_a_step_is_refused(tiny_config: Path) -> None:
    """It is in tokens, and someone meant steps."""
    with pytest.raises(ValueError, match=r"ema_half_life_tokens = 255 is less than one step of 256 tokens"):
        load_config(tiny_config, ["train.ema_half_life_tokens=255"])
    assert load_config(tiny_config, ["train.ema_half_life_tokens=256"]).train.ema_half_life_tokens == 256


def test_the_plan_counts_one_more_copy(tiny_config: Path) -> None:
    """fp32, sharded as the optimizer is, and offloaded with it."""
    count = ParameterCount(total=1500, non_embedding=1000, trained=1000)

    def optimizer(stage: int, *overrides: str) -> float:
        return model_states(load_config(tiny_config, list(overrides)), count, stage, ranks=8, activations=0).optimizer

    average = "train.ema_half_life_tokens=1000"
    for stage, expected in ((0, 4000), (1, 500), (2, 500), (3, 500)):
        assert optimizer(stage, average) - optimizer(stage) == expected
    assert optimizer(1, average, "deepspeed.offload_optimizer=true") == 0.0
