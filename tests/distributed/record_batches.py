"""A program for tests to start on each rank: pretraining that writes down what the engine is given in each step.

    record_batches.py FOLDER [ARGUMENTS OF PRETRAIN]

Each rank writes FOLDER/RANK.jsonl, an object for each sample in the order in which it is trained on.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from plumbline.launcher import pretrain
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine


def main() -> int | None:
    folder = Path(sys.argv[1])
    sys.argv = ["pretrain.py", *sys.argv[2:]]
    train_step = DeepSpeedEngine.train_step

    def recorded(engine: DeepSpeedEngine, micro_batches: list[Any], step: int, *rest: Any) -> Any:
        with (folder / f"{os.environ['RANK']}.jsonl").open("a", encoding="utf-8") as file:
            for batch in micro_batches:
                for number, tokens, labels in zip(
                    *(batch[key].tolist() for key in ("sample_index", "input_ids", "labels")), strict=True
                ):
                    row = {"completed": step, "sample": number, "tokens": tokens, "labels": labels}
                    file.write(f"{json.dumps(row)}\n")
        return train_step(engine, micro_batches, step, *rest)

    DeepSpeedEngine.train_step = recorded  # type: ignore[method-assign, assignment]
    return pretrain.main()


if __name__ == "__main__":
    sys.exit(main())
