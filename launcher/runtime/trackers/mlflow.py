"""Track by MLflow: on the server MLFLOW_TRACKING_URI, or if it is not set, in a database beside the run folders."""

import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from plumbline.launcher.runtime.trackers.kind import TrackedRun, Tracker, without_secrets

if TYPE_CHECKING:
    from mlflow import MlflowClient

T = TypeVar("T")
METRICS, PARAMETERS = 1000, 100  # that MLflow takes in one request
REFUSED = re.compile(r"[^\w./ -]")  # in the name of a metric


class MLflow(Tracker):
    """Log metrics to a run of MLflow, which each attempt sets to running again.

    MLflow cannot change parameters, so they are those of the first attempt.
    """

    package = "mlflow"

    def __init__(self, run: TrackedRun, run_id: str | None, step: int) -> None:  # noqa: ARG002 - it cannot forget
        from mlflow import MlflowClient

        database = f"sqlite:///{(run.folder.parent / 'mlflow.db').absolute()}"
        address = os.environ.get("MLFLOW_TRACKING_URI") or database
        self._client = MlflowClient(address)
        self.run_id = run_id or self._create(run)
        self._client.update_run(self.run_id, status="RUNNING")
        self.where = f"run {self.run_id} at {without_secrets(address)}"

    def _create(self, run: TrackedRun) -> str:
        from mlflow.entities import Param

        experiment = _experiment(self._client, run.project)
        run_id: str = self._client.create_run(experiment, run_name=run.folder.name).info.run_id
        for some in _in_parts([Param(path, str(value)) for path, value in run.settings.items()], PARAMETERS):
            self._client.log_batch(run_id, params=some)
        return run_id

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Log a point of each metric, now."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(permitted(key), value, now, step) for key, value in values.items()]
        for some in _in_parts(metrics, METRICS):
            self._client.log_batch(self.run_id, metrics=some)

    def close(self) -> None:
        """Mark the run as no longer running."""
        self._client.set_terminated(self.run_id)


def permitted(key: str) -> str:
    """Return the name of a metric, with _ for each character that MLflow forbids: eval/c__/loss for a corpus c++."""
    return REFUSED.sub("_", key)


def _experiment(client: "MlflowClient", name: str) -> str:
    """Return the id of an experiment, creating it if necessary; another run may create it at the same time."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def _in_parts(items: list[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of up to `size`."""
    for first in range(0, len(items), size):
        yield items[first : first + size]
