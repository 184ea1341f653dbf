"""Look for what torch.compile needs of a host."""

import os
import shutil
import sysconfig
from pathlib import Path


def missing_to_compile(on_gpu: bool) -> str | None:
    """Return what is missing to compile code, and how to get it; None: nothing.

    On a GPU torch.compile hands kernels to Triton, which builds a launcher for them in C; on a CPU it writes C++.

    Args:
        on_gpu: whether the code is for a GPU.
    """
    if not on_gpu:
        name = os.environ.get("CXX", "c++")
        return (
            None if shutil.which(name) else f"C++ compiler {name!r} not found: install g++, or point CXX at a compiler"
        )
    named = os.environ.get("CC")
    if not any(map(shutil.which, [named] if named else ["gcc", "clang"])):
        found = f"C compiler {named!r} of CC" if named else "C compiler (gcc or clang)"
        return f"{found} not found: install gcc, or point CC at a compiler"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return None if header.exists() else f"{header} not found: install the headers of this Python (Debian: python3-dev)"
