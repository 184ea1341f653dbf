"""Determine from an error's text, of torch, CUDA, NCCL or gloo, whether a device is broken or full, or a rank gone."""

DEVICE_FAULTS = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "hardware stack error",
    "device(s) is/are busy or unavailable",
    "no CUDA-capable device is detected",
    "system not yet initialized",
    "CUDA error: unknown error",
)
"""Texts of CUDA's errors that come from the device or its driver (214, 220, 714, 46, 100, 802, 999), not from a kernel:
an illegal address or a failed launch may be our own bug."""
OUT_OF_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "Cuda failure 2 'out of memory'",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)
"""Texts of torch's allocators, CUDA, NCCL and cuBLAS."""
RANK_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited or there was a network error",
)
"""Texts of gloo (its pairs of sockets) and NCCL where the process at the other end is no more."""


def is_of_device(error: Exception) -> bool:
    """Return whether a CUDA error says that a GPU of this node is broken or unusable."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in DEVICE_FAULTS)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that a device or a host is out of memory."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


def is_of_lost_rank(error: Exception) -> bool:
    """Return whether an error says that another rank has ended while this one exchanged something with it."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in RANK_GONE)


def out_of_memory(error: Exception, node: str, remedy: str) -> RuntimeError:
    """Return an error with the node, the requested memory and the remedy, without torch's remarks on its settings."""
    said = ". ".join(str(error).splitlines()[0].split(". ")[:3])
    others = "" if "CPU" in said else "; nvidia-smi shows what other processes have"
    return RuntimeError(f"no memory is left on {node} ({said}): {remedy}{others}")
