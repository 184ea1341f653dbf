"""Join the process group of all ranks, as training does; failures are most often due to the network."""

import os
import socket
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # torch.distributed has them without telling mypy

from plumbline.launcher.runtime.doctor.check import EVERYWHERE, Facts, Finding, Place, Report
from plumbline.launcher.runtime.ranks.process_group import listen_where_others_reach


def measure(place: Place) -> Facts:
    """Join, meet once, and measure the time."""
    world, began = place.world, time.monotonic()
    listen_where_others_reach()
    backend, gpu = "gloo", None
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
        # Not torchrun's 1, with which torch would kill this process, and the store with it, on a time-out
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        backend, gpu = "nccl", world.device
    dist.init_process_group(
        backend,
        store=PrefixStore("group", place.meeting),
        rank=world.rank,
        world_size=world.size,
        timeout=place.patience,
        device_id=gpu,
    )
    dist.barrier()
    if backend != "gloo":  # ranks agree on checkpoints over gloo, which may use a different network from NCCL
        beside = dist.new_group(backend="gloo", timeout=place.patience)
        dist.barrier(beside)
        dist.destroy_process_group(beside)
        backend = f"{backend} and gloo"
    return {"backend": backend, "seconds": time.monotonic() - began, "host": socket.gethostname()}


def judge(reports: Sequence[Report]) -> list[Finding]:
    """Report that all ranks met; one that could not is named by its failure."""
    slowest = max(report.facts["seconds"] for report in reports)
    backend = reports[0].facts["backend"]
    return [Finding("ok", EVERYWHERE, f"{len(reports)} rank(s) form a group over {backend}, in {slowest:.1f} s")]
