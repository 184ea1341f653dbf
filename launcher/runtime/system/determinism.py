"""Make torch repeat every step to the last bit (run.deterministic), as far as its kernels can.

`torch.use_deterministic_algorithms` chooses other kernels, or raises if there are none. By its sources and
documentation it also makes scaled_dot_product_attention avoid cuDNN, whose backward pass is not deterministic
(`check_cudnn_deterministic`), makes flash and memory-efficient attention sum their gradients in a fixed order, and
keeps Inductor from choosing kernels by timing them (`torch._inductor.config.deterministic`).
"""

import os

import torch

WORKSPACES = (":4096:8", ":16:8")  # with other values cuBLAS may choose a different kernel for each call


def enforce(wanted: bool, device: torch.device) -> None:
    """Set whether torch repeats its results; for GPUs, this must come before their first use.

    Raises:
        ValueError: a GPU is already in use, so it is too late; or the environment requests the opposite.
    """
    if torch.are_deterministic_algorithms_enabled() != wanted:  # the call imports Inductor
        torch.use_deterministic_algorithms(wanted)
    # Uninitialized memory is never read here, and torch would fill each new buffer
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = wanted, False
    if not wanted or device.type != "cuda":
        return
    found = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if found not in (None, *WORKSPACES):
        raise ValueError(
            f"CUBLAS_WORKSPACE_CONFIG = {found}: run.deterministic = true needs {' or '.join(WORKSPACES)}: unset it"
        )
    if found is None and torch.cuda.memory_reserved(device):  # querying the device's properties is harmless
        raise ValueError(
            "run.deterministic = true: this process has computed on the GPU already, without CUBLAS_WORKSPACE_CONFIG: "
            f"export CUBLAS_WORKSPACE_CONFIG={WORKSPACES[0]} before the start"
        )
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACES[0])
    os.environ.setdefault("NCCL_ALGO", "Ring")  # a fixed order of summation


def describe(device: torch.device) -> str:
    """Return a description of what is in force on a device after `enforce`."""
    chosen = ["torch's deterministic algorithms"] if torch.are_deterministic_algorithms_enabled() else []
    if device.type == "cuda":
        chosen += [f"{name}={os.environ[name]}" for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")]
    return ", ".join(chosen)
