"""Let libraries keep what they compile and trace in a folder of a node's own disk; nothing here imports torch."""

import os
import socket
import tempfile
from pathlib import Path

from plumbline.launcher.runtime.system.files import is_own_folder
from plumbline.launcher.runtime.system.log import LOG

NAME = "PLUMBLINE_NODE_FOLDER"
"""Variable with the folder's path, set by slurm/cluster.env; without it libraries choose places of their own."""
WRITABLE_BY_OTHERS = 0o022


def use_node_folder() -> None:
    """Make the node's folder the place of caches and traces, unless the user has named others; call before torch.

    Inductor unpickles what its cache holds, and Triton loads libraries from its own: who can write there can run code
    in this process. In /tmp anybody may have made a folder of that name first, so a folder that is not this user's
    alone is left to whoever it belongs to, and a new one takes its place.
    """
    if not os.environ.get(NAME):
        return
    folder = named = Path(os.environ[NAME])
    try:
        _claim(folder)
    except OSError as error:
        folder = Path(tempfile.mkdtemp(prefix="plumbline-"))
        if os.environ.get("SLURM_LOCALID", "0") == "0":  # the others on this node have the same to say
            LOG.warning(
                f"{NAME} {named} on {socket.gethostname()} is not used: {error}. Each process there compiles "
                f"anew, in a folder such as {folder}; remove it, or name another in slurm/cluster.env"
            )
        os.environ[NAME] = str(folder)  # for processes that this one starts
    places = {"TRITON_CACHE_DIR": folder / "triton", "TORCHINDUCTOR_CACHE_DIR": folder / "inductor"}
    if job := os.environ.get("SLURM_JOB_ID"):
        # What the names of files begin with; the rank follows. Torch's default is one name in the home folder for all
        # jobs, and a network may stand in the way of a write there.
        places["TORCH_FR_DUMP_TEMP_FILE"] = folder / f"nccl-trace-{job}-rank_"
    for name, place in places.items():
        chosen = os.environ.get(name)
        # A shell in which another of our programs was started hands on what that one chose
        if not chosen or Path(chosen).is_relative_to(named):
            os.environ[name] = str(place)


def _claim(folder: Path) -> None:
    """Make the folder this user's alone.

    Raises:
        OSError: it cannot be made, or others own it or may have written there.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not is_own_folder(folder):
            raise PermissionError("it is a link, or not a folder of this user") from None
    if folder.lstat().st_mode & WRITABLE_BY_OTHERS:
        raise PermissionError("other users may write there")
    folder.chmod(0o700)
