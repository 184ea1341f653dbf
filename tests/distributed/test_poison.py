"""Poison among many samples is named by replay.py --step, exactly, and the run without it is proven."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from plumbline.data.loader import TrainBatches
from plumbline.data.prepare import Request, prepare
from plumbline.data.sources import Sources
from plumbline.launcher.runtime.config.load import load_config

if TYPE_CHECKING:
    from tests.conftest import Command, Pretrain, Run, Start

LENGTH, BATCH, POISONS = 32, 32, 3
SAMPLES = [9_600, 100_000]
"""Samples that are trained on, each a document of its own."""
SENTENCE = "the cat sat on a mat and saw how one dog ran off to its den by sun set now"
WORDS = SENTENCE.split()


@dataclass(frozen=True)
class Poisoned:
    """Hold a run, and step -> the numbers of its poison samples."""

    run: Run
    poisons: dict[int, set[int]]


def text(rng: random.Random) -> str:
    """Return a document that fills a sample with its end: a number of its own, and 26 letters of words in an order."""
    first = rng.randrange(len(WORDS))
    words = " ".join(WORDS[(first + place) % len(WORDS)] for place in range(12))
    return f"{rng.randrange(10_000):04} {words}"[: LENGTH - 1]


def poison(rng: random.Random) -> str:
    """Return a document as long, of bytes that no other has."""
    return "x" + "".join(chr(rng.randrange(0x100, 0x700)) for _ in range((LENGTH - 2) // 2))


@pytest.fixture(scope="module", params=SAMPLES)
def poisoned(
    request: pytest.FixtureRequest, run_pretrain: Pretrain, tiny_config: Path, tmp_path_factory: pytest.TempPathFactory
) -> Poisoned:
    """Train on a corpus with poison in it, whose order puts it where the model has learned the rest."""
    folder, rng = tmp_path_factory.mktemp("poison"), random.Random(1)
    documents = [text(rng) for _ in range(request.param * 21 // 20)]  # some are held out
    for place in rng.sample(range(request.param), POISONS):
        documents[place] = poison(rng)
    lines = "".join(f"{json.dumps({'text': document})}\n" for document in documents)
    (folder / "documents.jsonl").write_text(lines, encoding="utf-8")
    prepare(Request(Sources((str(folder / "documents.jsonl"),)), "byte", folder / "corpus", workers=1))
    steps = request.param // BATCH
    overrides = [
        f"data.train=[{{path: {folder}/corpus}}]",
        *(f"data.global_batch_size={BATCH}", f"data.micro_batch_size={BATCH // 2}", f"train.steps={steps}"),
        *(f"checkpoint.interval={steps // 6}", "checkpoint.keep_last=9", "train.eval_interval=null"),
    ]
    seed, poisons = late_order(load_config(tiny_config, overrides).data, steps)
    outcome = run_pretrain(tiny_config, f"poison_{steps}", [*overrides, f"run.seed={seed}"])
    assert outcome.code == 0, outcome.stderr
    return Poisoned(outcome.run, poisons)


def late_order(data: Any, steps: int) -> tuple[int, dict[int, set[int]]]:
    """Return a seed by which all poison comes in the second half, and where that is."""
    for seed in range(1, 200):
        found: dict[int, set[int]] = {}
        for step, batches in enumerate(TrainBatches(data, seed).iterate(0, steps), start=1):
            for batch in batches:
                foreign = ((batch["input_ids"] >= 128) & (batch["input_ids"] < 256)).sum(1) > LENGTH // 2
                if foreign.any():
                    found.setdefault(step, set()).update(batch["sample_index"][foreign].tolist())
        if sum(map(len, found.values())) == POISONS and min(found) > steps // 2:
            return seed, found
    raise AssertionError("no order puts all poison in the second half")


def test_poison_is_named_exactly(poisoned: Poisoned, command: Command) -> None:
    for step, numbers in poisoned.poisons.items():
        done = command("replay", poisoned.run.folder, "--step", str(step), "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert set(found["causes"]) == numbers
        assert found["difference"] is None
        assert found["tests"] <= len(numbers) * (math.log2(BATCH) + 2)
        assert {sample["sample"] for sample in found["samples"]} == numbers
        assert all(sample["documents"][0]["text"].startswith("x") for sample in found["samples"])
        assert found["spike"]["value"] > found["spike"]["usual"]["limit"] >= found["without"][0]["grad_norm"]


def test_an_ordinary_step_is_no_spike(poisoned: Poisoned, command: Command) -> None:
    step = min(poisoned.poisons) - 3
    done = command("replay", poisoned.run.folder, "--step", str(step))
    assert done.returncode == 1, done.stderr
    assert "no spike" in done.stdout


LAYOUTS: dict[str, tuple[int, str, list[str]]] = {
    "as_it_was": (2, "ranks", ["deepspeed.zero_stage=3"]),
    "one_process": (1, "ranks", []),
    "any_ranks_on_one": (1, "ranks", ["run.reproducible=any_ranks", "deepspeed.precision=bf16"]),
    "deepspeed_offload": (2, "deepspeed", ["deepspeed.zero_stage=2", "deepspeed.offload_optimizer=true"]),
    "deepspeed_stage_0": (2, "deepspeed", ["deepspeed.zero_stage=0", "optimizer.name=muon"]),
}
"""Name -> ranks that replay a run of two, their launcher, and what the run is."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_of_two_ranks_is_searched(start: Start, tiny_config: Path, name: str) -> None:
    """Of 24 steps, in which one sample of step 14 has a gradient a thousand times as large."""
    ranks, launcher, overrides = LAYOUTS[name]
    folder = tiny_config.parent / "runs" / f"poison_{name}"
    poison = {"POISON": json.dumps([(107, 108, 1000)])}
    words = ["--config", tiny_config, f"run.root={folder.parent}", f"run.name={folder.name}", "train.steps=24"]
    words += ["train.eval_interval=null", "checkpoint.interval=8", "data.micro_batch_size=1", *overrides]
    program = "tests/distributed/poisoned.py"
    trained = start(program, words, folder, ranks=2, env=poison).wait()
    assert trained.code == 0, trained.stderr
    words = [folder, "--step", "14", "--json"]
    outcome = start(program, words, folder, ranks=ranks, launcher=launcher, env=poison | {"VERB": "replay"}).wait()
    assert outcome.code == 0, outcome.stdout + outcome.stderr
    found, _ = json.JSONDecoder().raw_decode(outcome.stdout, outcome.stdout.index("{\n"))  # a launcher prints as well
    assert (found["causes"], found["explained"], found["difference"]) == ([107], True, None)
    assert found["tolerance"] == (1e-3 if name == "one_process" else None)
    assert [made["step"] for made in found["without"]] == list(range(14, 23))
