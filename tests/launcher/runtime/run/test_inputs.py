"""What training reads is the same on every rank, or training does not begin."""

import os
from contextlib import closing
from pathlib import Path

import pytest
import torch

from plumbline.data.folders import UnlikeManifestError
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.inputs import disagreement, open_inputs
from plumbline.launcher.runtime.train.checks import open_checked
from tests.data.made import shard


def test_ranks_that_see_the_same_agree(tiny_config: Path) -> None:
    views = [(load_config(tiny_config, []), {"corpus": "0123"}) for _ in range(3)]
    assert disagreement(views) is None


def test_a_rank_that_sees_other_files_is_named_with_what_differs(tiny_config: Path) -> None:
    config = load_config(tiny_config, [])
    other = load_config(tiny_config, ["model.vocab_size=300"])
    found = disagreement([(config, {"a": "01", "b": "02"}), (config, {"a": "01", "b": "02"}), (other, {"a": "99"})])
    assert found is not None
    first, *lines = found.splitlines()
    assert first.startswith("rank 2 does not see what rank 0 does; ")
    assert lines == ["  model.vocab_size: 257 -> 300", "  fingerprint of a: 01 -> 99", "  fingerprint of b: 02 -> None"]


def test_a_rank_pins_its_batches_on_its_own_gpu(tiny_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of a node see all its GPUs, and none is selected when inputs are opened."""
    selected: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    config = load_config(tiny_config, ["data.global_batch_size=4", "data.micro_batch_size=1"])
    inputs = open_inputs(config, World(3, 3, 4, torch.device("cuda", 3)))
    with closing(inputs.train.iterate(0, 1)) as steps:
        next(steps)
    assert set(selected) == {3}


def test_a_process_alone_compares_the_sizes_of_all_files_and_one_of_many_does_when_asked(
    tiny_config: Path, corpus: Path, tmp_path: Path
) -> None:
    shard(corpus, tmp_path / "cut", [9, 10])
    os.truncate(tmp_path / "cut" / "train-00001.bin", 2)
    config = load_config(tiny_config, [f"data.train=[{{path: {tmp_path / 'cut'}}}]", "data.micro_batch_size=1"])
    plan, cpu = plan_run(config), torch.device("cpu")
    with pytest.raises(UnlikeManifestError, match=r"train-00001\.bin: has 2 bytes, corpus\.json expects \d+"):
        open_checked(config, plan, World(0, 0, 1, cpu))
    inputs = open_checked(config, plan, World(0, 0, 2, cpu), alone=False)
    with pytest.raises(UnlikeManifestError, match=r"train-00001\.bin: has 2 bytes"):
        inputs.check_sizes()


def test_a_task_before_a_corpus_needs_the_vocabulary_of_the_corpus(tiny_config: Path, corpus: Path) -> None:
    """To leave model.vocab_size out, which a configuration without it has done, would change nothing."""
    world = World(0, 0, 1, torch.device("cpu"))
    sources = f"data.train=[{{task: {{name: addition}}}}, {{path: {corpus}}}]"
    with pytest.raises(ConfigError, match=r"13 is smaller than the vocabulary of .* \(257\): set 257 or more; if left"):
        open_inputs(load_config(tiny_config, ["model.vocab_size=null", sources]), world)
    open_inputs(load_config(tiny_config, ["model.vocab_size=257", sources]), world)
