"""Where compiled code and traces lie on a node: in a folder of this user alone."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from plumbline.launcher.runtime.system.node_folder import NAME, use_node_folder
from tests.conftest import REPOSITORY

PLACES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_FR_DUMP_TEMP_FILE")


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the node's folder as a job of Slurm names it, which is not there yet."""
    for name in (*PLACES, "SLURM_LOCALID"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv(NAME, str(tmp_path / "node"))
    return tmp_path / "node"


def mode(folder: Path) -> int:
    return stat.S_IMODE(folder.lstat().st_mode)


@pytest.mark.parametrize("before", [None, 0o755])
def test_it_is_made_for_this_user_alone(named: Path, before: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    if before is not None:
        named.mkdir(before)
    use_node_folder()
    assert mode(named) == 0o700
    inside = [str(named / name) for name in ("triton", "inductor", "nccl-trace-7-rank_")]
    assert [os.environ[name] for name in PLACES] == inside
    assert capsys.readouterr().err == ""


def link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(0o700)
    folder.symlink_to(folder.parent / "elsewhere")


def shared(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o1777)


def of_another_user(folder: Path) -> None:
    folder.mkdir(0o755)
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(folder, 12345, 12345)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (link, "it is a link, or not a folder of this user"),
        (shared, "other users may write there"),
        (of_another_user, "it is a link, or not a folder of this user"),
        (Path.touch, "it is a link, or not a folder of this user"),
    ],
    ids=["link", "shared", "another-users", "file"],
)
def test_what_others_may_have_put_there_is_neither_read_nor_written(
    named: Path, make: Callable[[Path], None], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make(named)
    use_node_folder()
    used = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent
    assert mode(used) == 0o700
    assert {Path(os.environ[name]).parent for name in PLACES} == {used}
    assert used.parent == named.parent / "tmp"
    told = capsys.readouterr().err
    assert f"warning: {NAME} {named} on " in told
    assert why in told
    use_node_folder()  # as a process that this one starts
    assert capsys.readouterr().err == ""
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == used


def test_what_the_user_has_named_stays(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/project/triton")
    use_node_folder()
    assert os.environ["TRITON_CACHE_DIR"] == "/project/triton"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(named / "inductor")


def test_without_a_name_nothing_is_chosen(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME)
    use_node_folder()
    assert not named.exists()
    assert not set(PLACES) & set(os.environ)


def test_what_was_chosen_in_a_folder_of_others_does_not_stay(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job takes over the variables of the program that submitted it, which may have chosen on another node."""
    link(named)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(named / "triton"))
    use_node_folder()
    assert Path(os.environ["TRITON_CACHE_DIR"]).parent.parent == named.parent / "tmp"


@pytest.mark.parametrize("program", ["pretrain.py", "sweep.py", "plan.py"])
def test_every_program_of_a_job_has_it_ahead_of_torch(named: Path, tiny_config: Path, program: str) -> None:
    (named.parent / "torch.py").write_text("import os; print(os.environ['TRITON_CACHE_DIR']); os._exit(0)\n")
    environment = {**os.environ, "PYTHONPATH": str(named.parent)}
    command = (sys.executable, REPOSITORY / "launcher" / program, "--config", tiny_config)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str(named / "triton")
