"""What a process asks of its system before ranks meet."""

import resource
from types import SimpleNamespace

import pytest

from plumbline.launcher.runtime.system.startup import MANY_FILES, allow_many_files, ask_torch_for_free_memory


@pytest.mark.parametrize(
    ("soft", "hard", "asked"),
    [
        (1024, 2**20, [(MANY_FILES, 2**20)]),
        (1024, resource.RLIM_INFINITY, [(MANY_FILES, resource.RLIM_INFINITY)]),
        (1024, 4096, [(4096, 4096)]),
        (4096, 4096, []),
        (2**20, 2**20, []),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, []),
    ],
)
def test_as_many_files_as_ranks_need_where_that_is_allowed(
    soft: int, hard: int, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _which, limits: found.append(limits))
    allow_many_files()
    assert found == asked


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
