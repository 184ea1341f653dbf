"""Run.deterministic sets all that torch, cuBLAS and NCCL go by, in time, and says what it has set.

No GPU is here: whether CUDA is in use is patched. What torch does on a CPU is real.
"""

import os
from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config as inductor

from plumbline.launcher.runtime.system.determinism import describe, enforce

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ours = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")
    monkeypatch.setattr(os, "environ", {key: value for key, value in os.environ.items() if key not in ours})
    yield
    enforce(False, CPU)


def test_torch_is_told_and_told_otherwise() -> None:
    for wanted in (False, True, False):
        enforce(wanted, CPU)
        assert torch.are_deterministic_algorithms_enabled() is wanted
        assert not torch.is_deterministic_algorithms_warn_only_enabled(), "flash attention would stay as it is"
        assert torch.backends.cudnn.deterministic is wanted
        assert inductor.deterministic is wanted, "kernels are not chosen by measuring"
        assert describe(CPU) == ("torch's deterministic algorithms" if wanted else "")
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_libraries_of_a_gpu_are_told_by_the_environment() -> None:
    enforce(True, GPU)
    assert describe(GPU) == "torch's deterministic algorithms, CUBLAS_WORKSPACE_CONFIG=:4096:8, NCCL_ALGO=Ring"


def test_what_the_user_chose_stays() -> None:
    os.environ.update(CUBLAS_WORKSPACE_CONFIG=":16:8", NCCL_ALGO="Tree")
    enforce(True, GPU)
    assert describe(GPU).endswith("CUBLAS_WORKSPACE_CONFIG=:16:8, NCCL_ALGO=Tree")


def test_a_workspace_that_varies_is_refused() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
    with pytest.raises(ValueError, match=r"CUBLAS_WORKSPACE_CONFIG = :0:0: run.deterministic = true needs :4096:8"):
        enforce(True, GPU)
    enforce(False, GPU)


def test_who_has_computed_on_the_gpu_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 2**21)
    with pytest.raises(ValueError, match="has computed on the GPU already, without CUBLAS_WORKSPACE_CONFIG: export"):
        enforce(True, GPU)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    enforce(True, GPU)
