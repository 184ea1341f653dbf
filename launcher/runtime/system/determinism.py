"""Make torch repeat every step to the last bit (run.deterministic), as far as its kernels can.

`torch.use_deterministic_algorithms` chooses other kernels, or raises where there are none, and does more than its name
says, by its sources and documentation: scaled_dot_product_attention passes cuDNN by, whose backward pass cannot be
repeated (`check_cudnn_deterministic`), and flash and memory-efficient attention add up their gradients in one order;
Inductor measures nothing on the device to choose kernels by (`torch._inductor.config.deterministic`).
"""

import os

import torch

WORKSPACES = (":4096:8", ":16:8")  # with others cuBLAS may choose another kernel from call to call


def enforce(wanted: bool, device: torch.device) -> None:
    """Set whether torch repeats its results; on GPUs before the first use of one.

    Raises:
        ValueError: on a GPU it is too late, or the environment asks for the opposite.
    """
    if torch.are_deterministic_algorithms_enabled() != wanted:  # the call alone imports Inductor
        torch.use_deterministic_algorithms(wanted)
    # Nobody reads such memory here, and torch would fill each new buffer
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = wanted, False
    if not wanted or device.type != "cuda":
        return
    found = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if found not in (None, *WORKSPACES):
        raise ValueError(
            f"CUBLAS_WORKSPACE_CONFIG = {found}: run.deterministic = true needs {' or '.join(WORKSPACES)}: unset it"
        )
    if found is None and torch.cuda.memory_reserved(device):  # to ask what device it is does no harm
        raise ValueError(
            "run.deterministic = true: this process has computed on the GPU already, without CUBLAS_WORKSPACE_CONFIG: "
            f"export CUBLAS_WORKSPACE_CONFIG={WORKSPACES[0]} before the start"
        )
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACES[0])
    os.environ.setdefault("NCCL_ALGO", "Ring")  # one order of summation, where NCCL would choose among several


def describe(device: torch.device) -> str:
    """Say what is in force on a device after `enforce`."""
    chosen = ["torch's deterministic algorithms"] if torch.are_deterministic_algorithms_enabled() else []
    if device.type == "cuda":
        chosen += [f"{name}={os.environ[name]}" for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")]
    return ", ".join(chosen)
