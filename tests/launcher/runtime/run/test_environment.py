"""The facts that a result may depend on."""

import json

import pytest
import torch

from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.environment import environment

WORLD = World(rank=0, local_rank=0, size=2, device=torch.device("cpu"))


def test_environment_says_what_a_result_may_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["launcher/pretrain.py", "--local_rank=0", "--config", "x.yaml"])
    facts = environment(WORLD)
    assert facts["command"] == ["launcher/pretrain.py", "--config", "x.yaml"], "as it was typed"
    json.dumps(facts)
    assert torch.__version__.startswith(facts["packages"]["torch"]), "which leaves +cu130 out"
    assert facts["packages"]["deepspeed"]
    assert facts["world_size"] == 2
    assert facts["cpus"] >= 1
    assert {"command", "python", "git_commit", "git_dirty", "host", "platform", "memory_bytes", "gpus"} <= facts.keys()
