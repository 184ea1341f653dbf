"""Join the process group of all ranks, as training does; what keeps ranks from it is most often the network."""

import os
import socket
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # torch.distributed has them without telling mypy

from plumbline.launcher.runtime.doctor.check import EVERYWHERE, Facts, Finding, Place, Report
from plumbline.launcher.runtime.system.process_group import listen_where_others_reach


def measure(place: Place) -> Facts:
    """Join, meet once, and say how long it took."""
    world, began = place.world, time.monotonic()
    listen_where_others_reach()
    backend, gpu = "gloo", None
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
        # Not the 1 of torchrun: torch would end this process, and with it the store, where ranks wait too long
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
    if backend != "gloo":  # over which ranks agree on checkpoints; it may take another network than NCCL
        beside = dist.new_group(backend="gloo", timeout=place.patience)
        dist.barrier(beside)
        dist.destroy_process_group(beside)
        backend = f"{backend} and gloo"
    return {"backend": backend, "seconds": time.monotonic() - began, "host": socket.gethostname()}


def judge(reports: Sequence[Report]) -> list[Finding]:
    """Say that all ranks met; one that could not is named by its failure."""
    slowest = max(report.facts["seconds"] for report in reports)
    backend = reports[0].facts["backend"]
    return [Finding("ok", EVERYWHERE, f"{len(reports)} rank(s) form a group over {backend}, in {slowest:.1f} s")]
