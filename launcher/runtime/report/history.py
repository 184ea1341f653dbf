"""Read what a run has written down so far, key by key."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plumbline.launcher.runtime.run.folder import RESULT
from plumbline.launcher.runtime.system.files import read_json_lines

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """Hold one number over the run."""

    steps: Floats
    tokens: Floats
    values: Floats


@dataclass(frozen=True)
class History:
    """Hold a run folder, as far as it is a sequence of numbers."""

    folder: Path
    complete: bool
    """Whether the last step was reached and evaluated."""
    series: dict[str, Series]
    """Key of metrics.jsonl -> its values, in the order of steps."""
    skipped: list[int]
    """Steps whose update was not applied."""

    def layers(self, quantity: str) -> dict[str, Series]:
        """Return place -> series of quantity/PLACE, in the order of depth."""
        prefix = f"{quantity}/"
        return {key.removeprefix(prefix): self.series[key] for key in sorted(self.series) if key.startswith(prefix)}

    def quantities(self, kind: str) -> list[str]:
        """Return what there is of a kind by place: gain -> gain/mean_self_attn.q_norm, ..."""
        return sorted(
            {key.rpartition("/")[0] for key in self.series if key.startswith(f"{kind}/") and key.count("/") == 2}
        )


def read_history(folder: Path) -> History:
    """Read a run folder; the run may still be going on.

    Raises:
        ValueError: it is not a run folder, or metrics.jsonl in it cannot be read or is empty.
    """
    file = folder / "metrics.jsonl"
    if not file.is_file():
        raise ValueError(f"{folder}: no metrics.jsonl there; give a run folder, such as runs/quickstart")
    columns: dict[str, list[tuple[int, int, float]]] = {}
    skipped: list[int] = []
    for number, record in read_json_lines(file):
        for key in ("step", "tokens"):
            if not isinstance(record.get(key), int):
                raise ValueError(f"{file}, line {number}: {key} = {record.get(key)!r} is not a number of a step")
        step, tokens = record.pop("step"), record.pop("tokens")
        if record.pop("skipped", False):
            skipped.append(step)
        for key, value in record.items():
            if isinstance(value, (int, float)):
                columns.setdefault(key, []).append((step, tokens, value))
    if not columns:
        raise ValueError(f"{file}: holds no numbers yet; the first come with the first logged step")
    series = {key: Series(*np.array(column, dtype=np.float64).T) for key, column in columns.items()}
    return History(folder, (folder / RESULT).is_file(), series, skipped)
