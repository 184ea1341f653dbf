"""Look for what torch.compile needs of a host with GPUs: Triton builds a launcher of its kernels in C."""

import os
import shutil
import sysconfig
from pathlib import Path


def missing_c_compiler() -> str | None:
    """Return that there is no C compiler, and what to do; None: Triton finds one."""
    named = os.environ.get("CC")
    if any(map(shutil.which, [named] if named else ["gcc", "clang"])):
        return None
    found = f"C compiler {named!r} of CC" if named else "C compiler (gcc or clang)"
    return f"{found} not found: install gcc, or point CC at a compiler"


def missing_header() -> str | None:
    """Return that Python's headers are not where Triton looks for them, and what to do; None: they are.

    A compiler may find them elsewhere (CPATH), so this is no proof.
    """
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme is for packages beside those of the system, and its headers are with the system's
    paths = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)
    header = Path(paths["include"]) / "Python.h"
    return None if header.exists() else f"{header} not found: install the headers of this Python (Debian: python3-dev)"
