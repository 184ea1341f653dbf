"""Tell from the words of an error of torch, CUDA or NCCL whether a device is broken, or has no more memory."""

DEVICE_FAULTS = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "hardware stack error",
    "device(s) is/are busy or unavailable",
    "no CUDA-capable device is detected",
    "system not yet initialized",
    "CUDA error: unknown error",
)
"""Words of CUDA's errors that come from the device or its driver (214, 220, 714, 46, 100, 802, 999), not from a kernel:
an illegal address, or a launch that failed, may be a bug of ours."""
OUT_OF_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "Cuda failure 2 'out of memory'",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)
"""Words of torch's allocators, of CUDA, of NCCL and of cuBLAS."""


def is_of_device(error: Exception) -> bool:
    """Return whether CUDA reports by an error that a GPU of this node is broken, or cannot be used by anybody."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in DEVICE_FAULTS)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that a device or a host has no more memory."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


def out_of_memory(error: Exception, node: str, remedy: str) -> RuntimeError:
    """Return an error with the node, what was asked for, and what to do; torch's own goes on about its settings."""
    said = ". ".join(str(error).splitlines()[0].split(". ")[:3])
    others = "" if "CPU" in said else "; nvidia-smi shows what other processes have"
    return RuntimeError(f"no memory is left on {node} ({said}): {remedy}{others}")
