"""A run in which nothing moves: each rank writes where it stands, the one that holds it up is named, the run ends."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from torch._C import _distributed_c10d

from plumbline.launcher.runtime.cluster.attempts import FROZEN, accused
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.status_file import read_attempts
from plumbline.launcher.runtime.system.exit_codes import COMPLETE, HUNG
from plumbline.launcher.runtime.train import watchdog
from plumbline.launcher.runtime.train.watchdog import COLLECTIVE, FOR_THE_DEVICE, Watchdog, stacks, suspects
from tests.conftest import PATIENCE, environment

if TYPE_CHECKING:
    from tests.conftest import Start

HOSTS = ["n1", "n1", "n2"]


def wrote(rank: int, *files: str) -> str:
    """Return what a rank writes whose main thread stands in these files, beside a thread of gloo's."""
    lines = "".join(f'  File "/x/{file}", line 7, in f\n    f()\n' for file in files)
    return f'rank {rank} on n1, making step 9\n\nMainThread\n{lines}\nThread-1\n  File "/x/torch/distributed/y.py"\n'


def test_who_wrote_nothing_or_stands_elsewhere_holds_the_others_up() -> None:
    waiting = ["launcher/pretrain.py", "torch/distributed/distributed_c10d.py"]
    texts = {0: wrote(0, *waiting), 2: wrote(2, "launcher/pretrain.py", "data/loader.py")}
    assert suspects(texts, HOSTS) == [
        "rank 1 on n1 wrote nothing: it is frozen or dead, or its node is",
        'rank 2 on n2 is not in a collective but in File "/x/data/loader.py", line 7, in f',
    ]
    assert suspects({rank: wrote(rank, *waiting) for rank in range(3)}, HOSTS) == []
    assert suspects({rank: wrote(rank, "data/loader.py") for rank in range(3)}, HOSTS) == [], "nobody waits for anybody"


def test_on_a_gpu_ranks_wait_for_their_devices() -> None:
    waiting = wrote(0, "launcher/pretrain.py", "torch/autograd/graph.py")
    reading = wrote(1, "launcher/pretrain.py", "torch/cuda/streams.py")
    texts = {0: waiting, 1: reading, 2: wrote(2, "launcher/pretrain.py", "data/loader.py")}
    on_gpu = (*COLLECTIVE, *FOR_THE_DEVICE)
    assert suspects(texts, HOSTS, on_gpu) == [
        'rank 2 on n2 is not in a collective but in File "/x/data/loader.py", line 7, in f'
    ]
    assert suspects(texts, HOSTS) == []


def test_stacks_begin_with_the_main_thread_and_know_the_calls() -> None:
    text = stacks()
    assert text.startswith("MainThread\n")
    assert "test_stacks_begin_with_the_main_thread_and_know_the_calls" in text.split("\n\n")[0]


def test_stacks_have_threads_that_python_has_not_started() -> None:
    """As those are in which autograd calls hooks on a GPU."""
    started, done = ctypes.c_ulong(), threading.Event()
    inside = threading.Event()

    def called_from_c(_argument: object) -> None:
        inside.set()
        assert done.wait(60)

    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(called_from_c)
    ctypes.CDLL(None).pthread_create(ctypes.byref(started), None, run, None)
    assert inside.wait(60)
    text = stacks()
    done.set()
    ctypes.CDLL(None).pthread_join(started, None)
    assert "not of Python\n" in text
    assert "called_from_c" in text


def test_where_torch_knows_nccl_its_last_collectives_are_written(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "GRACE", 0.0)
    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace", lambda: b"collectives", raising=False)
    on_gpu = replace(world, device=torch.device("cuda", 0))
    watch_until_it_ends(tmp_path / "gpu", on_gpu)
    assert (tmp_path / "gpu" / "nccl_trace_rank_0").read_bytes() == b"collectives"
    watch_until_it_ends(tmp_path / "cpu", world)
    assert [file.name for file in (tmp_path / "cpu").iterdir()] == ["rank_00000.txt"], "gloo keeps none"


def test_a_device_that_tells_nothing_any_more_does_not_hide_who_is_waited_for(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> bytes:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr(watchdog, "GRACE", 0.0)
    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace", broken, raising=False)
    watch_until_it_ends(tmp_path / "stacks", replace(world, device=torch.device("cuda", 0)))
    told = capsys.readouterr().err
    assert "nothing moved for" in told
    assert "the last collectives of rank 0 are not known: CUDA error" in told


@pytest.mark.parametrize(("silent", "codes"), [(1190, []), (1210, [HUNG])])
def test_time_in_which_the_whole_process_was_stopped_is_no_hang(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, silent: int, codes: list[int]
) -> None:
    """As by Ctrl-Z, or in a job that Slurm suspends for another one: the watch then wakes up hours late."""
    now = 0.0
    pauses = iter([1.0] * 600 + [36_000.0] + [1.0] * silent)

    class Stopped:
        def wait(self, _seconds: float) -> bool:
            nonlocal now
            pause = next(pauses, None)
            now += pause or 0.0
            return pause is None

    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(Watchdog, "_say", lambda _self, _seconds: None)
    ended: list[int] = []
    watch = Watchdog(tmp_path, world, None, ended.append)
    monkeypatch.setattr(watch, "_stopped", Stopped())
    watch._watch(1200.0)
    assert ended == codes


BLOCKED = """
import ctypes, sys, time
from pathlib import Path
import torch
from torch._C import _distributed_c10d
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.train import watchdog
_distributed_c10d._dump_nccl_trace = lambda: ctypes.PyDLL(None).sleep(1000)  # and keeps other threads of Python waiting
watchdog.GRACE, watchdog.PATIENCE = 0.0, 1.0
watchdog.Watchdog(Path(sys.argv[1]), World(0, 0, 1, torch.device("cuda", 0)), minutes=0.5 / 60)
time.sleep(1000)
"""


def test_a_device_that_holds_up_all_of_python_does_not_keep_the_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BLOCKED, str(tmp_path)]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == -signal.SIGALRM, ended.stderr
    assert "nothing moved for" in ended.stderr


@pytest.mark.parametrize(
    ("job", "others", "said"), [(None, [1], {}), ("7", [1], {"n2": FROZEN}), ("7", [], {})], ids=["none", "one", "most"]
)
def test_the_next_attempt_of_a_job_does_without_the_node_of_a_frozen_rank(
    tmp_path: Path,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    job: str | None,
    others: list[int],
    said: dict[str, str],
) -> None:
    """Where most ranks write nothing, it may be the one that writes that stands still, and they bear with it."""

    def meet(_mine: object, _world: object) -> list[str]:
        (tmp_path / "stacks").mkdir()
        for rank in others:
            file = tmp_path / "stacks" / f"rank_{rank:05d}.txt"
            file.write_text(wrote(rank, "torch/distributed/"))
            os.utime(file, (time.time() + 60,) * 2)  # it is not one of an earlier attempt
        return ["n1", "n1", "n2"]

    monkeypatch.setattr(watchdog, "GRACE", 0.0)
    monkeypatch.setattr(watchdog, "gather_objects", meet)
    if job is not None:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    watch_until_it_ends(tmp_path / "stacks", replace(world, size=3))
    assert accused(tmp_path / "slurm", ["n1", "n2"]) == said


@pytest.mark.parametrize("rank", [0, 5])
def test_the_lowest_rank_that_wrote_reads_what_all_wrote_and_the_others_nothing(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    """A disk that hangs is not asked for the files of all ranks by all of them; one of an earlier start counts not."""
    folder, size, read = tmp_path / "stacks", 8, []

    def meet(_mine: object, _world: object) -> list[str]:
        folder.mkdir(exist_ok=True)
        for other in range(size + 1):
            file = folder / f"rank_{other:05d}.txt"
            file.write_text(wrote(other, "torch/distributed/"))
            os.utime(file, (time.time() + 60,) * 2)
        return ["n1"] * size

    def read_text(path: Path, **_: object) -> str:
        read.append(path.name)
        return path.read_bytes().decode()

    monkeypatch.setattr(watchdog, "GRACE", 0.0)
    monkeypatch.setattr(watchdog, "gather_objects", meet)
    monkeypatch.setattr(Path, "read_text", read_text)
    watch_until_it_ends(folder, replace(world, rank=rank, size=size))
    assert len([name for name in read if name.startswith("rank_")]) == (0 if rank else size)
    assert ("nothing moved for" in capsys.readouterr().err) == (rank == 0)


def watch_until_it_ends(folder: Path, world: World) -> None:
    """Watch a rank that does not move, once it has met the others, until its watchdog ends it."""
    ended = threading.Event()
    Watchdog(folder, world, minutes=2 / 60, end=lambda _code: ended.set()).ranks_have_met()
    assert ended.wait(60)


def test_it_ends_the_process_when_nothing_moves_and_not_before(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watchdog, "GRACE", 0.0)
    codes: list[int] = []
    ended = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "rank_00007.txt").write_text("of an earlier attempt")
    busy = Watchdog(tmp_path / "stacks", world, minutes=2 / 60, end=end)
    busy.ranks_have_met()
    busy.suspend()
    assert not ended.wait(3), "longer than it may take to move, in which it is borne with"
    for _ in range(12):
        assert not ended.wait(0.25), "3 seconds, in which it moves"
        busy.beat("making step 9")
    assert ended.wait(60)
    assert codes == [HUNG]
    assert [file.name for file in (tmp_path / "stacks").iterdir()] == ["rank_00000.txt"]
    assert [file.name for file in (tmp_path / "stacks.before").iterdir()] == ["rank_00007.txt"]
    assert "nothing moved for 0.0333333 minutes while making step 9" in capsys.readouterr().err

    ended.clear()
    stopped = Watchdog(tmp_path / "stacks", world, minutes=1 / 60, end=end)
    stopped.stop()
    assert not ended.wait(2)


def test_it_ends_the_process_where_the_disk_hangs_as_well(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "GRACE", 0.0)
    monkeypatch.setattr(watchdog, "PATIENCE", 0.5)
    ended, answers = threading.Event(), threading.Event()
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: answers.wait(60))
    Watchdog(tmp_path / "stacks", world, minutes=0.5 / 60, end=lambda _code: ended.set())
    assert ended.wait(30)
    assert not answers.is_set()
    answers.set()


@pytest.mark.parametrize("blow", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_never_comes_is_missed(start_pretrain: Start, tiny_config: Path, blow: signal.Signals) -> None:
    """Struck at once, ahead of the imports. What an earlier attempt wrote that came no further is not heard."""
    name = f"never_came_{blow.name}"
    old = tiny_config.parent / "runs" / name / "stacks" / "rank_00001.txt"
    old.parent.mkdir(parents=True)
    old.write_text(wrote(1, "launcher/pretrain.py"))
    os.utime(old, (time.time() - 60,) * 2)
    job = start_pretrain(tiny_config, name, ["train.hang_minutes=0.2"], ranks=2)
    waiting, gone = job.processes
    gone.send_signal(blow)
    assert waiting.wait(120) == HUNG
    assert [attempt.exit_code for attempt in read_attempts(job.run.folder)] == [HUNG]
    message = "nothing moved for 0.2 minutes while meeting the other ranks (train.hang_minutes): rank 1 wrote nothing"
    assert message in job.texts()[1]
    gone.kill()
    again = start_pretrain(tiny_config, name, ["train.steps=2", "schedule.warmup=0steps"], ranks=2).wait()
    assert again.code == COMPLETE, again.stderr
    assert not old.exists()


def test_a_frozen_rank_is_named_and_the_others_end(start_pretrain: Start, tiny_config: Path) -> None:
    overrides = [
        "train.steps=50000",
        "train.eval_interval=null",
        "train.hang_minutes=0.5",
    ]  # the start-up of a busy machine fits in
    job = start_pretrain(tiny_config, "frozen_rank", overrides, ranks=2)
    job.wait_until(lambda: "step_00000010" in job.run.checkpoints)
    other, frozen = job.processes
    frozen.send_signal(signal.SIGSTOP)
    assert other.wait(120) == HUNG
    error = job.texts()[1]
    assert "rank 1 on " in error
    assert "wrote nothing: it is frozen or dead, or its node is; stacks in " in error
    assert "MainThread" in (job.run.folder / "stacks" / "rank_00000.txt").read_text()
    assert not (job.run.folder / "stacks" / "rank_00001.txt").exists()
    status = json.loads((job.run.folder / "status.json").read_text())
    assert (status["state"], status["attempt"]["exit_code"]) == ("hung", HUNG)
    assert "nothing moved for 0.5 minutes" in status["attempt"]["why"]
    frozen.send_signal(signal.SIGKILL)
