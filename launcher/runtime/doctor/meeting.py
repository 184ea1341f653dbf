"""Let ranks meet before there is a process group, and name those that do not arrive."""

import os
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed has them without telling mypy

from plumbline.launcher.runtime.cluster import nodes
from plumbline.launcher.runtime.doctor.check import EVERYWHERE, Finding
from plumbline.launcher.runtime.ranks.process_group import OTHER_PORT
from plumbline.launcher.runtime.ranks.world import World

CHECK = "arrival"


def open_store(world: World, seconds: float) -> Store:
    """Return the store at MASTER_ADDR:MASTER_PORT, which rank 0 or torchrun serves.

    Raises:
        ValueError: the port is taken, or nobody serves the store in time.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = world.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(address, port, is_master=serves, timeout=timedelta(seconds=seconds), wait_for_workers=False)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        reason = str(error).splitlines()[0]
        if serves:
            raise ValueError(
                f"{address}:{port} (MASTER_ADDR:MASTER_PORT): rank 0 cannot serve there; if another process has the "
                f"port, {OTHER_PORT}. {reason}"
            ) from error
        raise ValueError(
            f"{address}:{port} (MASTER_ADDR:MASTER_PORT): no answer to {nodes.node_name()} within {seconds:g} s; rank "
            f"0 did not start, or this node does not reach that address. {reason}"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"doctor/{attempt}", store)


def arrive(store: Store, world: World) -> None:
    """Tell the others that this rank is here, and on which node."""
    store.set(f"arrived/{world.rank}", nodes.node_name())


def absent(store: Store, keys: Sequence[str], seconds: float) -> list[int]:
    """Wait for keys, one per rank, and return the ranks whose key does not appear in time."""
    deadline = time.monotonic() + seconds
    missing = list(range(len(keys)))
    while missing:
        missing = [rank for rank in missing if not store.check([keys[rank]])]
        if not missing or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return missing


def nodes_of(store: Store, ranks: Sequence[int]) -> dict[int, str]:
    """Return the nodes of ranks that have arrived."""
    return {rank: store.get(f"arrived/{rank}").decode() for rank in ranks}


def findings_of_absence(missing: Sequence[int], arrived: dict[int, str], seconds: float) -> list[Finding]:
    """Name the ranks that did not arrive and, as far as Slurm knows, their nodes."""
    empty = sorted(set(_nodes_of_step()) - set(arrived.values()))
    ranks = ", ".join(str(rank) for rank in missing)
    here = ", ".join(f"{rank} ({node})" for rank, node in sorted(arrived.items()))
    text = f"rank(s) {ranks} did not arrive within {seconds:g} s; arrived: {here}"
    remedy = "look for the error of that rank in the log, and whether its node reaches MASTER_ADDR"
    findings = [Finding("bad", node, f"no rank of this node arrived. {text}", remedy, CHECK) for node in empty]
    return findings or [Finding("bad", EVERYWHERE, text, remedy, CHECK)]


def _nodes_of_step() -> tuple[str, ...]:
    """Return the nodes of this Slurm step; empty without Slurm."""
    names = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or ""
    try:
        return nodes.names_in(names)
    except (OSError, ValueError):  # in a container, say, or with a controller that does not answer
        return ()
