"""Laws whose constants are at the end of their range: what they leave open is left out, and said."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from plumbline.launcher.runtime.laws import prediction
from plumbline.launcher.runtime.laws.document import derive
from plumbline.launcher.runtime.system.files import finite
from plumbline.model.quantization.precision import PrecisionConfig
from plumbline.model.scaling_laws.points import points
from plumbline.model.scaling_laws.published import KUMAR

if TYPE_CHECKING:
    from pathlib import Path

    from plumbline.model.scaling_laws.law import Law

SIZE = (10**8, 10**8, 2 * 10**9)  # parameters, those of them in blocks, and tokens


def written(law: Law, folder: Path) -> str:
    """Write what is read of a law.json, and return its name."""
    training = {"parameters": [1e7, 1e9], "tokens": [1e9, 1e11]}
    about = {"source": "by hand", "training": training, "undetermined": [], "warnings": []}
    (folder / "law.json").write_text(json.dumps({"form": "precision", "constants": law.constants, **about}))
    return str(folder / "law.json")


@pytest.mark.parametrize(("undetermined", "stated"), [((), True), (("gamma_D",), False)])
def test_a_critical_size_beyond_numbers_is_written_as_null(undetermined: tuple[str, ...], stated: bool) -> None:
    endless = replace(KUMAR, C_T=1e-30, beta=0.05, gamma_D=1e-4)
    at = points(3e7, 1e9)
    fitted: Any = SimpleNamespace(law=endless, train=SimpleNamespace(at=at), undetermined=frozenset(undetermined))
    critical = finite(derive(fitted, []))["critical_tokens_per_parameter"]
    assert critical == ({"parameters": 3e7, "post_bits": dict.fromkeys("34568")} if stated else None)


@pytest.mark.parametrize(
    "constants", [{"alpha": 0.0, "beta": 0.0}, {"alpha": -0.3}, {"beta": -0.1}, {"A": 0.0}], ids=str
)
def test_a_law_without_a_best_split_says_so_once_and_predicts(constants: dict[str, float], tmp_path: Path) -> None:
    name = written(replace(KUMAR, **constants), tmp_path)
    found = prediction.predict(name, *SIZE, 50257, PrecisionConfig())
    assert len([note for note in found.notes if "no split is best" in note]) == 1
    assert not {"at_16_bits", "at_optimal_bits"} & set(found.allocations)
    assert math.isfinite(found.loss)
    assert any("no split is best" in line for line in prediction.lines(found))
