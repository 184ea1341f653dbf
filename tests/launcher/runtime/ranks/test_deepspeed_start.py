"""What DeepSpeed's start-up would do to a host."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from plumbline.launcher.runtime.ranks.deepspeed_start import ask_torch_for_free_memory
from tests.conftest import PATIENCE, environment

STARTED = """
import json, sys
from plumbline.launcher.runtime.ranks import process_group, world
process_group.join(world.read_world(), 1.0)
import deepspeed.runtime.zero.stage3, deepspeed.runtime.zero.stage_1_and_2
from deepspeed.runtime.zero.muon.muon_optimizer import muon_update
compilers = {"torch._dynamo.convert_frame", "torch._inductor.compile_fx"}
print(json.dumps([muon_update.__name__, sorted(compilers & set(sys.modules))]))
"""


def test_gpus_may_be_visible_by_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed counts the free memory of one as its stages 1 and 2 do, where NVML is installed."""
    from deepspeed.accelerator import cuda_accelerator

    monkeypatch.setattr(cuda_accelerator, "pynvml", SimpleNamespace(nvmlDeviceGetHandleByIndex=None))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5a1c0e9b,MIG-4f3b2a10")
    gpu = cuda_accelerator.CUDA_Accelerator.__new__(cuda_accelerator.CUDA_Accelerator)
    monkeypatch.setattr(gpu, "total_memory", lambda _index: 80)
    monkeypatch.setattr(gpu, "memory_allocated", lambda _index: 30)
    with pytest.raises(ValueError, match="GPU-5a1c0e9b"):
        gpu.available_memory(0)
    ask_torch_for_free_memory()
    assert gpu.available_memory(0) == 50


def test_a_rank_that_compiles_nothing_imports_no_compiler() -> None:
    """DeepSpeed's own Muon would: its functions are compiled where they are defined."""
    done = subprocess.run(
        [sys.executable, "-c", STARTED],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    muon, compilers = json.loads(done.stdout)
    assert muon == "muon_update"
    assert compilers == []
