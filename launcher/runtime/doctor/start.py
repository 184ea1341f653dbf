"""Make the cheap checks at each start of a run, once its ranks have met."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from plumbline.launcher.runtime.checkpoint.publishing import bytes_of_leftovers
from plumbline.launcher.runtime.checkpoint.store import checkpoints
from plumbline.launcher.runtime.cluster.nodes import node_name
from plumbline.launcher.runtime.config.budget import checkpoint_bytes
from plumbline.launcher.runtime.config.plan import RunPlan
from plumbline.launcher.runtime.config.run_files import CHECKPOINTS
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.doctor.check import EVERYWHERE, Finding, LocalNeed, Need, Place, Report
from plumbline.launcher.runtime.doctor.table import AT_START
from plumbline.launcher.runtime.ranks.collectives import from_main, gather_objects
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.system.log import LOG


class UnfitError(ValueError):
    """Refuse to start on nodes that cannot run it.

    Args:
        message: everything that is bad, and where.
        nodes: Slurm names of the nodes with a problem that others do not have.
    """

    def __init__(self, message: str, nodes: Sequence[str]) -> None:
        super().__init__(message)
        self.nodes = nodes


def need_of(config: Config, plan: RunPlan, leftovers: int = 0) -> Need:
    """Return the space needed for the checkpoints of a run, and how many exist.

    Args:
        config: the run's configuration.
        plan: the run's plan.
        leftovers: bytes of saves that were killed, if a start is about to delete them.
    """
    root = config.run.folder / CHECKPOINTS
    takes, kept = checkpoint_bytes(config, plan.rows), config.checkpoint.keep_last
    return Need(takes, kept, len(checkpoints(root)), leftovers)


def local_need_of(config: Config, plan: RunPlan, world: World) -> LocalNeed | None:
    """Return the space that a rank needs on its own node, or None if it writes nothing there."""
    local, name = config.checkpoint.local, config.run.name
    if local is None:
        return None
    ranks = world.size if config.deepspeed.zero_stage else 1  # over which the state is divided
    has_one = False
    with suppress(OSError):  # of a broken disk: as if there were none
        has_one = any(Path(local.path).glob(f"{name}-*/rank_{world.rank:05d}"))  # a new one is written before it goes
    return LocalNeed(Path(local.path), checkpoint_bytes(config, plan.rows) / ranks, 1 if has_one else 2)


def check_start(config: Config, plan: RunPlan, world: World) -> None:
    """Refuse to start with different versions on nodes, a full disk or an unsuitable file system. Collective.

    Raises:
        UnfitError: on all ranks, with all problems and the nodes.
    """
    folder = config.run.folder
    leftovers = from_main(lambda: bytes_of_leftovers(folder / CHECKPOINTS), world)  # stats many files
    place = Place(world, folder, need_of(config, plan, leftovers), local_need_of(config, plan, world))
    mine = node_name(), [check.take(place) for check in AT_START]
    told = gather_objects(mine, world)
    found: list[Finding] = []
    for number, check in enumerate(AT_START):
        found += check.examine([Report(rank, node, facts[number]) for rank, (node, facts) in enumerate(told)])
    for finding in found:
        if finding.level == "warning":
            LOG.warning(_sentence(finding))
    if bad := [finding for finding in found if finding.level == "bad"]:
        message = "the run was not started: " + "\n  ".join(map(_sentence, bad))
        nodes = {finding.node for finding in bad} - {EVERYWHERE}
        raise UnfitError(message, sorted(nodes) if nodes < {node for node, _ in told} else [])


def _sentence(finding: Finding) -> str:
    where = "" if finding.node == EVERYWHERE else f"{finding.node}: "
    return f"{where}{finding.text}; {finding.remedy}"
