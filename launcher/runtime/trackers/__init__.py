"""Send the numbers of a run to trackers; the kinds are listed by their names in `metrics.trackers`."""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Literal

from plumbline.launcher.runtime.trackers.kind import Tracker
from plumbline.launcher.runtime.trackers.mlflow import MLflow
from plumbline.launcher.runtime.trackers.tensorboard import TensorBoard
from plumbline.launcher.runtime.trackers.trackio import Trackio
from plumbline.launcher.runtime.trackers.wandb import WeightsAndBiases

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
TRACKERS: dict[TrackerName, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def check_trackers(names: Iterable[TrackerName]) -> None:
    """Refuse trackers that cannot work here, before anything is trained.

    Raises:
        ValueError: names missing packages and how to install them, or what else the user has to provide.
    """
    names = list(names)
    packages = [TRACKERS[name].package for name in names]
    if absent := [package for package in packages if package is not None and find_spec(package) is None]:
        raise ValueError(
            f"metrics.trackers = [{', '.join(names)}]: {' and '.join(absent)} cannot be imported: "
            f"pip install -e '.[{','.join(absent)}]', or leave out what you do not need"
        )
    for name in names:
        TRACKERS[name].check()


def caution_of_trackers(names: Iterable[TrackerName]) -> str | None:
    """Return a warning that a job would be refused for its trackers if its environment is the one here, or None."""
    try:
        check_trackers(names)
    except ValueError as error:
        return f"{error}; a job ends at its start for this, unless slurm/cluster.env gives it another environment"
    return None
