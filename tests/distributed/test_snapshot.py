"""A checkpoint in two halves: what was copied to host memory is written later, whatever training does meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
import xxhash

from plumbline.data import disk
from plumbline.launcher.runtime.checkpoint import publishing, resume, store
from plumbline.launcher.runtime.checkpoint.commit import Pace
from plumbline.launcher.runtime.checkpoint.commit import commit as commit_together
from plumbline.launcher.runtime.checkpoint.snapshot import take_snapshot
from plumbline.launcher.runtime.checkpoint.store import BrokenWeightsError
from plumbline.launcher.runtime.checkpoint.weights import TensorFile
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.base import Engine
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.engine.plain import PlainEngine
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.inputs import Inputs
from tests.distributed.conftest import save, state_after


@pytest.fixture(scope="module")
def config(tiny_config: Path) -> Config:
    return load_config(tiny_config, ["train.ema_half_life_tokens=512", "deepspeed.zero_stage=3"])


def step(engine: Engine, inputs: Inputs, number: int) -> float:
    return engine.train_step(inputs.train.micro_batches(number), number, 1e-3).result.loss.item()


@pytest.mark.parametrize("kind", ["plain", "stage 0", "stage 1", "stage 3"])
def test_training_goes_on_while_a_snapshot_waits(
    kind: str, tiny_config: Path, tmp_path: Path, inputs: Inputs, world: World
) -> None:
    """Written two steps late, it is the checkpoint of its own step: training goes on from it as it did before."""
    stage = kind[-1] if kind.startswith("stage") else "0"
    config = load_config(tiny_config, ["train.ema_half_life_tokens=512", f"deepspeed.zero_stage={stage}"])
    engine: Engine = PlainEngine(config, world) if kind == "plain" else DeepSpeedEngine(config, world)
    step(engine, inputs, 0)
    at_once = save(engine, config, state_after(1, inputs), tmp_path / "at_once", world)
    snapshot = take_snapshot(engine, state_after(1, inputs), locally=False)
    losses = [step(engine, inputs, number) for number in (1, 2)]
    late = commit_together(snapshot, tmp_path / "late", config.checkpoint, world, None, Pace())

    assert store.read_manifest(late) == store.read_manifest(at_once)
    assert store.problems(late, contents=True) == []
    assert resume.load(engine, late) == state_after(1, inputs)
    assert [step(engine, inputs, number) for number in (1, 2)] == losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_going_back_leaves_no_second_state_in_memory(
    stage: int, tiny_config: Path, tmp_path: Path, inputs: Inputs, world: World
) -> None:
    """DeepSpeed keeps views of the state of its first step: another one beside it would stay on the device for good."""
    config = load_config(tiny_config, [f"deepspeed.zero_stage={stage}"])
    engine = DeepSpeedEngine(config, world)
    step(engine, inputs, 0)
    states = [value for state in engine.optimizer_state.values() for value in state.values() if value.dim()]
    before = {value.data_ptr(): value.clone() for value in states}
    assert sum(value.numel() for value in states) >= 2 * sum(piece.length for piece in engine.pieces())
    saved = save(engine, config, state_after(1, inputs), tmp_path / "checkpoints", world)
    step(engine, inputs, 1)
    del states
    resume.load(engine, saved)
    after = [value for state in engine.optimizer_state.values() for value in state.values() if value.dim()]
    assert {value.data_ptr() for value in after} == set(before)
    assert all(value.equal(before[value.data_ptr()]) for value in after)


def test_what_is_written_is_not_read_again_and_every_folder_is_flushed(
    engine: Engine, config: Config, inputs: Inputs, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    written = disk.sync

    def sync(path: Path) -> None:
        flushed.append(path.name)
        written(path)

    for module in (publishing, disk):  # files and folders; renamed ones
        monkeypatch.setattr(module, "sync", sync)
    with monkeypatch.context() as patched:
        patched.setattr(store, "_checksum", lambda path: pytest.fail(f"{path} is read"))
        folder = save(engine, config, state_after(1, inputs), tmp_path, world)
    assert store.problems(folder, contents=True) == []
    before, name, pointer = flushed[-3:]
    assert before.startswith(".step_00000001."), "the manifest"
    assert name == pointer == tmp_path.name, "the final names of the folder and of the pointer"
    assert "state" in flushed


def test_a_weight_that_is_not_finite_is_refused_before_anything_is_written(
    engine: Engine, config: Config, inputs: Inputs, world: World, tmp_path: Path
) -> None:
    weight = engine.master_weights()[0].detach()
    kept = weight.view(-1)[0].clone()
    weight.view(-1)[0] = torch.nan
    with pytest.raises(BrokenWeightsError, match="1 tensors hold weights that are not finite"):
        save(engine, config, state_after(1, inputs), tmp_path / "checkpoints", world)
    weight.view(-1)[0] = kept
    assert not (tmp_path / "checkpoints").exists()


def test_a_file_is_the_one_that_safetensors_writes(tmp_path: Path) -> None:
    tensors = {"b.2": torch.randn(5, 3).T, "a": torch.tensor(1.5), "b.10": torch.zeros(0), "ü": torch.randn(2)}
    facts = publishing.write_files({"x.safetensors": TensorFile(tensors, {"format": "pt"})}, tmp_path, store.silent)
    data = (tmp_path / "x.safetensors").read_bytes()
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert data == safetensors.torch.save(contiguous, {"format": "pt"})
    assert facts == {"x.safetensors": {"bytes": len(data), "xxh3": xxhash.xxh3_64_hexdigest(data)}}


def test_a_rank_that_outlives_its_attempt_does_not_write_into_the_next(tmp_path: Path) -> None:
    former, ours = (publishing.staging_folder(tmp_path, 1) for _ in range(2))
    publishing.make_room(former)
    publishing.make_room(ours)
    publishing.write_files({"state.json": "{}"}, former, store.silent)
    assert list(ours.iterdir()) == []


def test_a_later_checkpoint_of_another_process_stays(
    engine: Engine, config: Config, inputs: Inputs, world: World, tmp_path: Path
) -> None:
    """It is whole, so training would have gone on from it, had it been there; and it counts for nobody's keep_last."""
    for number in (1, 2, 9):
        save(engine, config, state_after(number, inputs), tmp_path, world)
    save(engine, config, state_after(3, inputs), tmp_path, world)
    assert [store.step_of(folder) for folder in store.checkpoints(tmp_path)] == [9, 3, 2]
    (tmp_path / "step_00000009" / "state.json").write_text("{}")
    save(engine, config, state_after(4, inputs), tmp_path, world)
    assert [store.step_of(folder) for folder in store.checkpoints(tmp_path)] == [4, 3]
