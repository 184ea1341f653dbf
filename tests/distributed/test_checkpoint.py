"""Checkpoints exist whole or not at all: damage of every kind, retention, refusals, a full disk.

One process group of one rank and one real engine serve most of it; two ranks are needed only where one of them fails.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from plumbline.launcher.runtime.checkpoint import publishing, resume
from plumbline.launcher.runtime.checkpoint import store as checkpoint
from plumbline.launcher.runtime.checkpoint.store import CheckpointError
from plumbline.launcher.runtime.checkpoint.tensors import read_model, shard_name
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.models.open import load_model
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.inputs import Inputs, open_inputs
from plumbline.launcher.runtime.system.exit_codes import REQUEUE
from tests.distributed.conftest import save, state_after, whole_weights
from tests.distributed.test_joining import write_pair

if TYPE_CHECKING:
    from tests.conftest import Job, Pretrain, Start

KINDS = {
    "tensors": "state/rank_00000.safetensors",
    "state": "state.json",
    "configuration": "config.yaml",
    "manifest": "manifest.json",
}


@pytest.fixture(scope="module")
def config(tiny_config: Path) -> Config:
    return load_config(tiny_config, ["checkpoint.keep_last=3", "train.ema_half_life_tokens=512"])


@pytest.fixture(scope="module")
def original(
    engine: DeepSpeedEngine, config: Config, inputs: Inputs, world: World, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Make checkpoints of steps 1, 2 and 3."""
    root = tmp_path_factory.mktemp("original") / "checkpoints"
    for step in range(3):
        engine.train_step(inputs.train.micro_batches(step), step, 1e-3)
        assert save(engine, config, state_after(step + 1, inputs), root, world) == root / f"step_0000000{step + 1}"
    return root


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    """Return a copy to damage."""
    shutil.copytree(original, tmp_path / "run" / "checkpoints")
    return tmp_path / "run" / "checkpoints"


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def test_manifest_covers_every_file(root: Path) -> None:
    folder = root / "step_00000003"
    manifest = checkpoint.read_manifest(folder)
    present = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert set(manifest["files"]) == present - {"manifest.json"}
    assert set(KINDS.values()) <= present
    assert {name: facts["bytes"] for name, facts in manifest["files"].items()} == {
        name: (folder / name).stat().st_size for name in manifest["files"]
    }
    assert {key: manifest[key] for key in ("world_size", "zero_stage", "precision", "step", "samples", "tokens")} == {
        "world_size": 1,
        "zero_stage": 1,
        "precision": "fp32",
        "step": 3,
        "samples": 24,
        "tokens": 768,
    }
    assert checkpoint.problems(folder, contents=True) == []


def test_others_may_read_what_the_umask_lets_them(original: Path) -> None:
    reference = original.parent / "reference"
    reference.touch()
    allowed = reference.stat().st_mode
    files = [path for path in original.rglob("*") if path.is_file()]
    assert [path.name for path in files if path.stat().st_mode & allowed != allowed] == []


def test_newest_whole_checkpoint_is_found_and_pointed_at(root: Path, world: World) -> None:
    assert resume.find(root, world) == root / "step_00000003"
    assert (root / "latest").read_text() == "step_00000003\n"


def test_nothing_there_is_not_an_error(tmp_path: Path, world: World) -> None:
    assert resume.find(tmp_path / "checkpoints", world) is None


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "another step's"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_damage_is_noticed_and_passed_over(
    root: Path, world: World, capsys: pytest.CaptureFixture[str], kind: str, damage: str
) -> None:
    file = root / "step_00000003" / KINDS[kind]
    size = file.stat().st_size
    if damage == "flip":
        flip(file, size // 2)
    elif damage == "truncate":
        os.truncate(file, size // 2)
    elif damage == "delete":
        file.unlink()
    else:
        of_another = root / "step_00000001" / KINDS[kind]
        if of_another.read_bytes() == file.read_bytes():
            assert kind == "configuration", "which is the same at every step"
            return
        shutil.copy(of_another, file)
    assert resume.find(root, world) == root / "step_00000002"
    warning = capsys.readouterr().err
    assert warning.startswith("warning: ")
    assert "step_00000003" in warning
    assert KINDS[kind] in warning
    assert len(warning.splitlines()) == 1


def test_a_checkpoint_under_the_name_of_another_step_is_passed_over(
    root: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "step_00000003").rename(root / "step_00000007")
    assert resume.find(root, world) == root / "step_00000002"
    assert "step_00000007 cannot be used and is passed over: manifest.json is of step 3" in capsys.readouterr().err


def test_parts_of_two_ranks_in_each_others_place_are_noticed(
    run_pretrain: Pretrain, tiny_config: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run_pretrain(tiny_config, "exchanged", ["train.eval_interval=null"], ranks=2)
    assert outcome.code == 0, outcome.stderr
    root = outcome.run.folder / "checkpoints"
    mine, other = (root / "step_00000020" / shard_name(rank) for rank in (0, 1))
    between = mine.with_name("between")
    for source, target in ((mine, between), (other, mine), (between, other)):
        source.rename(target)
    assert resume.find(root, world) == root / "step_00000010"
    assert "step_00000020 cannot be used and is passed over: state/rank_00000" in capsys.readouterr().err


def test_a_file_that_was_cut_is_noticed_without_reading_it(root: Path) -> None:
    file = root / "step_00000003" / KINDS["tensors"]
    size = file.stat().st_size
    os.truncate(file, size - 1)
    assert checkpoint.problems(file.parents[1]) == [f"{KINDS['tensors']} has {size - 1} bytes, expected {size}"]


def test_any_flipped_byte_of_the_manifest_is_noticed(root: Path) -> None:
    """Every other file is vouched for by the manifest; it must vouch for itself."""
    folder = root / "step_00000003"
    expected = checkpoint.read_manifest(folder)
    for position in range((folder / "manifest.json").stat().st_size):
        flip(folder / "manifest.json", position)
        with contextlib.suppress(CheckpointError):  # else it is a flip that JSON does not see
            assert checkpoint.read_manifest(folder) == expected, f"byte {position}"
        flip(folder / "manifest.json", position)


def test_a_checkpoint_of_another_format_is_refused_not_passed_over(
    root: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT", checkpoint.FORMAT + 1)
    with pytest.raises(
        CheckpointError, match=f"format {checkpoint.FORMAT - 1}, this version reads {checkpoint.FORMAT}"
    ):
        resume.find(root, world)


@pytest.mark.parametrize("file", ["state/rank_00000.safetensors", "config.yaml", "manifest.json"])
def test_opening_a_run_falls_back_to_its_newest_whole_weights(
    root: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = root.parent
    assert load_model(run, torch.device("cpu")).step == 3
    flip(run / "checkpoints" / "step_00000003" / file, 100)
    assert load_model(run, torch.device("cpu")).step == 2
    warning = capsys.readouterr().err
    assert "passed over" in warning
    assert file in warning
    for step in (1, 2):
        (run / "checkpoints" / f"step_{step:08d}" / "manifest.json").unlink()
    with pytest.raises(ValueError, match="holds no whole checkpoint"):
        load_model(run, torch.device("cpu"))


def test_no_whole_checkpoint_is_refused(root: Path, world: World, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in root.glob("step_*"):
        (folder / "state.json").unlink()
    with pytest.raises(CheckpointError, match="no whole checkpoint among 3; to start from scratch, remove "):
        resume.find(root, world)
    assert capsys.readouterr().err.count("state.json is missing") == 3


def test_leftover_staging_folders_are_ignored_and_cleaned(
    root: Path, engine: DeepSpeedEngine, config: Config, inputs: Inputs, world: World
) -> None:
    for step in (3, 4, 9):
        shutil.copytree(root / "step_00000002", root / f".step_{step:08d}.0123abcd.staging")
    assert resume.find(root, world) == root / "step_00000003"
    save(engine, config, state_after(4, inputs), root, world)
    assert sorted(path.name for path in root.iterdir()) == [
        "latest", "step_00000002", "step_00000003", "step_00000004"
    ]  # fmt: skip
    assert resume.find(root, world) == root / "step_00000004"


def test_what_a_kill_in_the_middle_of_a_save_left_is_put_right_at_the_next_start(root: Path) -> None:
    """Before the folder had its final name, and between that and the pointer's."""
    shutil.copytree(root / "step_00000002", root / ".step_00000004.0123abcd.staging")
    (root / ".latest.0123abcd.staging").write_text("step_00000003\n")
    (root / "latest").write_text("step_00000002\n")
    publishing.tidy(root, root / "step_00000003")
    assert sorted(path.name for path in root.iterdir()) == [
        "latest", "step_00000001", "step_00000002", "step_00000003"
    ]  # fmt: skip
    assert (root / "latest").read_text() == "step_00000003\n"


def test_retention(root: Path, tiny_config: Path, engine: DeepSpeedEngine, inputs: Inputs, world: World) -> None:
    config = load_config(tiny_config, ["checkpoint.keep_last=2", "checkpoint.keep_every=2"])
    for step in (4, 5, 6, 7):
        save(engine, config, state_after(step, inputs), root, world)
        assert (root / "latest").read_text() == f"step_{step:08d}\n"
    assert [int(folder.name[5:]) for folder in checkpoint.checkpoints(root)] == [7, 6, 4, 2]


def test_damaged_checkpoints_do_not_crowd_out_whole_ones(
    root: Path, tiny_config: Path, engine: DeepSpeedEngine, inputs: Inputs, world: World
) -> None:
    """A run that fell back, and saves again before it reaches the damaged step, keeps what it saves."""
    config = load_config(tiny_config, ["checkpoint.keep_last=1"])
    flip(root / "step_00000003" / "state.json", 3)
    assert resume.find(root, world) == root / "step_00000002"
    save(engine, config, state_after(2, inputs), root, world)
    assert resume.find(root, world) == root / "step_00000002"
    assert [folder.name for folder in checkpoint.checkpoints(root)] == ["step_00000002"]
    assert load_model(root.parent, torch.device("cpu")).step == 2


def test_a_damaged_checkpoint_is_replaced(
    root: Path, engine: DeepSpeedEngine, config: Config, inputs: Inputs, world: World
) -> None:
    flip(root / "step_00000003" / KINDS["tensors"], 5000)
    save(engine, config, state_after(3, inputs), root, world)
    assert resume.find(root, world) == root / "step_00000003"


def test_load_restores_weights_and_position(
    root: Path, engine: DeepSpeedEngine, config: Config, inputs: Inputs, world: World
) -> None:
    expected = read_model(root / "step_00000002")
    assert resume.load(engine, root / "step_00000002") == state_after(2, inputs)
    found = whole_weights(engine)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(found["lm_head.weight"], read_model(root / "step_00000003")["lm_head.weight"])


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["deepspeed.precision=bf16"], "deepspeed.precision: 'fp32' -> 'bf16'"),
        (["model.hidden_size=128", "model.head_dim=32"], "model.hidden_size: 64 -> 128"),
        (["parameterization.base_hidden_size=16"], "parameterization.base_hidden_size: 32 -> 16"),
        (["objective.z_loss=0.1"], "objective.z_loss: 0.0 -> 0.1"),
        (["data.global_batch_size=16"], "data.global_batch_size: 8 -> 16"),
        (["run.seed=2"], "run.seed: 1 -> 2"),
        (["data.train.0.weight=3.0"], f"data.train.0.weight: 1.0 -> 3.0{resume.WEIGHTS}"),
    ],
)
def test_a_resume_that_contradicts_the_run_is_refused(
    root: Path, tiny_config: Path, config: Config, inputs: Inputs, overrides: list[str], line: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(resume, "same_past", lambda *_: False)  # as it is of a mixture
    new, folder = load_config(tiny_config, overrides), root / "step_00000003"
    with pytest.raises(CheckpointError, match=r"another run\.name") as caught:
        resume.check_resume(config, new, inputs.fingerprints, folder)
    assert f"  {line}" in str(caught.value).splitlines()


@pytest.fixture
def byte_pair(tmp_path: Path) -> Path:
    """Return a second corpus."""
    return write_pair(tmp_path / "more", 40)


def test_another_corpus_is_refused(root: Path, config: Config, inputs: Inputs, world: World) -> None:
    folder = root / "step_00000003"
    with pytest.raises(CheckpointError, match=r"corpora: .*'email': '(?!0123)\w+'.* -> .*'email': '0123'"):
        resume.check_resume(config, config, {"email": "0123"}, folder)


def test_the_mixture_may_change_from_the_checkpoint_on(
    root: Path, tiny_config: Path, corpus: Path, byte_pair: Path, config: Config, inputs: Inputs, world: World
) -> None:
    """The checkpoint is that of step 3, after 3 x 8 x 32 = 768 tokens."""
    folder = root / "step_00000003"

    def joined(tokens: int) -> Config:
        joins = f"{{path: {byte_pair}, weight: 0.0, weight_changes: [{{tokens: {tokens}, weight: 1.0}}]}}"
        return load_config(tiny_config, [f"data.train=[{{path: {corpus}}}, {joins}]"])

    after, before = joined(768), joined(767 - 32)
    resume.check_resume(config, after, open_inputs(after, world).fingerprints, folder)
    joins = r"data\.train: \['email'\] -> \['email', 'more'\]; to add .* weight_changes: \[{tokens: 768, weight: 1}\]$"
    with pytest.raises(CheckpointError, match=joins):
        resume.check_resume(config, before, open_inputs(before, world).fingerprints, folder)


def test_a_corpus_that_moved_is_the_same_by_its_name(
    root: Path, tiny_config: Path, corpus: Path, config: Config, inputs: Inputs, tmp_path: Path
) -> None:
    folder, renamed = root / "step_00000003", shutil.copytree(corpus, tmp_path / "renamed")
    paths = (tmp_path / "email", renamed)
    gone, new = (load_config(tiny_config, [f"data.train.0.path={at}", "model.vocab_size=257"]) for at in paths)
    resume.check_resume(gone, config, inputs.fingerprints, folder)
    now = {"renamed": inputs.fingerprints["email"]}
    with pytest.raises(
        CheckpointError, match=r"of other values; .*\n.*; renamed has the tokens of email: give it name: email"
    ):
        resume.check_resume(config, new, now, folder)
    with pytest.raises(
        CheckpointError, match=r"step_00000003: data\.train: email .* cannot be opened, .*: put it back"
    ):
        resume.check_resume(gone, new, now, folder)


def test_what_does_not_shape_the_run_may_change(
    root: Path, tiny_config: Path, config: Config, inputs: Inputs, world: World
) -> None:
    overrides = [
        "optimizer.lr=0.001",
        "train.steps=90",
        "data.micro_batch_size=4",
        "deepspeed.zero_stage=3",
        "run.name=other",
        "schedule.name=cosine",
    ]
    new = load_config(tiny_config, overrides)
    resume.check_resume(config, new, inputs.fingerprints, root / "step_00000003")


def test_a_full_disk_is_one_error_and_earlier_checkpoints_stay(
    original: Path, tmp_path: Path, engine: DeepSpeedEngine, config: Config, inputs: Inputs, world: World
) -> None:
    """A file system with room for one checkpoint; without the right to mount one, a limit on the size of files."""
    root = tmp_path / "small"
    root.mkdir()
    size = sum(path.stat().st_size for path in (original / "step_00000003").rglob("*") if path.is_file())
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(1.6 * size)}", "tmpfs", str(root)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        whole = save(engine, config, state_after(1, inputs), root, world)
        if not mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size // 4, limits[1]))
        with pytest.raises(
            CheckpointError, match=r"checkpoint not written \(rank 0: .* are free there.*free some space"
        ):
            save(engine, config, state_after(2, inputs), root, world)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert sorted(path.name for path in root.iterdir()) == ["latest", "step_00000001"]
        assert resume.find(root, world) == whole
        assert resume.load(engine, whole) == state_after(1, inputs)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if mounted:
            subprocess.run(["umount", "--lazy", str(root)], check=True)  # a failed write may keep its file open


def test_a_checkpoint_that_cannot_be_deleted_is_tried_again(
    root: Path,
    config: Config,
    engine: DeepSpeedEngine,
    inputs: Inputs,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As on NFS, while a file of it is held open somewhere: the new checkpoint is whole, and training goes on."""
    remove = shutil.rmtree

    def refuse(folder: Path, **options: Any) -> None:
        if "step_00000001" in folder.name:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        remove(folder, **options)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refuse)
        assert save(engine, config, state_after(4, inputs), root, world) == root / "step_00000004"
    assert "step_00000001 cannot be deleted" in capsys.readouterr().err
    assert resume.find(root, world) == root / "step_00000004"
    assert [int(folder.name[5:]) for folder in checkpoint.checkpoints(root)] == [4, 3, 2]
    save(engine, config, state_after(5, inputs), root, world)
    assert sorted(path.name for path in root.iterdir()) == [
        "latest", "step_00000003", "step_00000004", "step_00000005"
    ]  # fmt: skip


def newest(job: Job) -> int:
    """Return the step of the newest checkpoint of a run."""
    return max(int(name[5:]) for name in job.run.checkpoints if name.startswith("step_"))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_write_for_a_while_does_not_end_the_run(
    start_pretrain: Start, tiny_config: Path, failing: int
) -> None:
    job = start_pretrain(tiny_config, f"full_{failing}", ["train.steps=50000", "train.eval_interval=null"], ranks=2)
    job.wait_until(lambda: "step_00000010" in job.run.checkpoints)
    pid = job.processes[failing].pid
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    # metrics.jsonl stays below it, every shard of DeepSpeed's is above it
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (300_000, limits[1]))
    job.wait_until(lambda: job.texts()[1].count(f"checkpoint not written (rank {failing}: ") == 2)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    kept = newest(job)
    job.wait_until(lambda: newest(job) > kept)
    for process in job.processes:
        process.send_signal(signal.SIGTERM)
    outcome = job.wait()
    assert outcome.code == REQUEUE, outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert "the next save tries again" in outcome.stderr
    for name in (name for name in job.run.checkpoints if name != "latest"):
        folder = job.run.folder / "checkpoints" / name
        assert checkpoint.problems(folder, contents=True) == []
