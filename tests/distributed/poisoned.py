"""Pretrain, or replay, on data of which some samples break what they are in; tests start it on several ranks.

    POISON='[[96, 112, "inf"], [192, 200, 100]]' poisoned.py --config FILE ...     arguments are those of pretrain.py
    VERB=replay POISON=... poisoned.py RUN --step 24                               or of another entry point

Each entry is first sample, stop, and what the loss of a micro-batch with one of them is multiplied by.
"""

import json
import os
import runpy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from plumbline.model.objectives.next_token import NextToken
from plumbline.model.objectives.objective import Losses

Poison = Iterable[tuple[int, int, float | str]]
WHOLE = NextToken.forward


def forward_with(poison: Poison) -> Any:
    """Return what takes the place of `NextToken.forward`."""

    def forward(objective: NextToken, model: Any, batch: Any, step: int) -> Losses:
        losses = WHOLE(objective, model, batch, step)
        samples = batch["sample_index"]
        for first, stop, factor in poison:
            if ((first <= samples) & (samples < stop)).any():
                losses = losses._replace(
                    terms=losses.terms * float(factor), cross_entropy=losses.cross_entropy * float(factor)
                )
        return losses

    return forward


if __name__ == "__main__":
    verb = os.environ.get("VERB", "pretrain")
    NextToken.forward = forward_with(json.loads(os.environ.get("POISON", "[]")))  # type: ignore[method-assign]
    runpy.run_path(str(Path(__file__).parents[2] / "launcher" / f"{verb}.py"), run_name="__main__")
