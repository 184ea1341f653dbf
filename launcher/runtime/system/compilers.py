"""Look for what torch.compile needs on a host with GPUs: Triton builds launchers of its kernels in C."""

import os
import shutil
import sysconfig
from pathlib import Path


def missing_c_compiler() -> str | None:
    """Return that there is no C compiler and the remedy, or None if Triton finds one."""
    named = os.environ.get("CC")
    if any(map(shutil.which, [named] if named else ["gcc", "clang"])):
        return None
    found = f"C compiler {named!r} of CC" if named else "C compiler (gcc or clang)"
    return f"{found} not found: install gcc, or point CC at a compiler"


def missing_header() -> str | None:
    """Return that Python's headers are not where Triton looks for them and the remedy, or None if they are.

    A compiler may find them elsewhere (CPATH), so this is not certain.
    """
    scheme = sysconfig.get_default_scheme()
    # Debian's scheme is for packages installed beside the system's, but its headers are the system's
    paths = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)
    header = Path(paths["include"]) / "Python.h"
    return None if header.exists() else f"{header} not found: install the headers of this Python (Debian: python3-dev)"
