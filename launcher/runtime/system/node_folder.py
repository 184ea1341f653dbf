"""Put the compile caches and traces of libraries into a folder on the node's own disk; nothing here imports torch."""

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
    """Make the node's folder the place of caches and traces, unless the user has chosen others; call before torch.

    Inductor unpickles its cache, and Triton loads libraries from its own: anyone who can write there can run code in
    this process. In /tmp another user may have created a folder of that name first, so a folder that other users own
    or can write to is not used, and a new one is created instead.
    """
    if not os.environ.get(NAME):
        return
    folder = named = Path(os.environ[NAME])
    try:
        _claim(folder)
    except OSError as error:
        folder = Path(tempfile.mkdtemp(prefix="plumbline-"))
        if os.environ.get("SLURM_LOCALID", "0") == "0":  # the other ranks on this node would log the same
            LOG.warning(
                f"{NAME} {named} on {socket.gethostname()} is not used: {error}. Each process there compiles "
                f"anew, in a folder such as {folder}; remove it, or name another in slurm/cluster.env"
            )
        os.environ[NAME] = str(folder)  # for processes that this one starts
    places = {"TRITON_CACHE_DIR": folder / "triton", "TORCHINDUCTOR_CACHE_DIR": folder / "inductor"}
    if job := os.environ.get("SLURM_JOB_ID"):
        # A prefix of file names, which the rank follows. By default torch uses the same names in the home folder for
        # all jobs, and the home folder may be on a network disk that does not respond.
        places["TORCH_FR_DUMP_TEMP_FILE"] = folder / f"nccl-trace-{job}-rank_"
    for name, place in places.items():
        chosen = os.environ.get(name)
        # A value under the node's folder was set by another of our programs, which started this one, not by the user
        if not chosen or Path(chosen).is_relative_to(named):
            os.environ[name] = str(place)


def _claim(folder: Path) -> None:
    """Create the folder for this user alone.

    Raises:
        OSError: the folder cannot be created, or others own it or may have written to it.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not is_own_folder(folder):
            raise PermissionError("it is a link, or not a folder of this user") from None
    if folder.lstat().st_mode & WRITABLE_BY_OTHERS:
        raise PermissionError("other users may write there")
    folder.chmod(0o700)
