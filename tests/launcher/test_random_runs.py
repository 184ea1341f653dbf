"""Random configurations that a dry run accepts: they train, resume to the bit, and every command takes what they leave.

PLUMBLINE_RANDOM_RUNS=200 makes as many instead of a few. What a dry run refuses loses one of the keys that the error
names, until it is accepted: so refusals are tried as well, each of which must be an error and no traceback.
"""

import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from plumbline.launcher.runtime.config.schema import Config
from plumbline.model.attention import ATTENTIONS
from plumbline.model.blocks import BLOCKS
from plumbline.model.families import FAMILIES
from tests.benchmarks.wrong_values import Node, alternatives, leaves
from tests.conftest import Command, Outcome, Pretrain, Run, Start

NAMED = {"model.family": [*FAMILIES], "model.block": [*BLOCKS], "model.attention": [*ATTENTIONS]}
"""Key of free text -> its values."""
OFTEN = ("model.family", "objective.name", "optimizer.name", "deepspeed.zero_stage", "parameterization.rule")
"""Keys that are drawn every other time; of the others a few are."""
LEFT_ALONE = re.compile(
    r"run\.|data\.(train|validation|cache)|train\.(steps|tokens|initialize_from|hang_minutes|profile)|schedule\.branch|"
    r"precision\.float8$|checkpoint\.local|metrics\.trackers|guards\.transfer|deepspeed\.timeout|model\.vocab_size"
)
"""Keys whose values are places, need a GPU, or change what the test itself sets."""
INTEGERS, NUMBERS = (1, 2, 3, 4, 8, 16, 32, 64), (0.001, 0.1, 0.5, 0.9, 1.0, 2.0, 10.0)
DURATIONS = ("1 steps", "2 steps", "50%", "64 tokens", "1000 tokens")
MAY_REFUSE = ("generate", "export", "quantize")
"""Commands that some models are refused by, such as one whose window is shorter than the prompt."""
MIXTURES = (
    "[{CORPUS}, {task: {name: retrieval, pairs: 4, keys: 8, values: 8}, weight: 0.5}]",
    "[{CORPUS, weight_changes: [{tokens: 300, weight: 0.1}]}, {CORPUS, name: again, weight: 2}]",
)
STEPS, HALF, BATCHES = 4, 2, 4
Rehearse = Callable[[Mapping[str, str]], "subprocess.CompletedProcess[str]"]
RUNS = range(int(os.environ.get("PLUMBLINE_RANDOM_RUNS", "4")))


class Key(NamedTuple):
    """Hold a key, and the override that it needs if it belongs to one of several schemas of its section."""

    path: str
    chosen: str | None


@cache
def pool() -> dict[Key, list[str]]:
    """Return values for every key of the configuration, as YAML."""
    found: dict[Key, list[str]] = {}
    schema = Config.model_json_schema()
    for section, node in schema["properties"].items():
        for path, choice, leaf in leaves(section, node, schema["$defs"]):
            values = NAMED.get(path) or [*values_of(leaf, schema["$defs"])]
            if LEFT_ALONE.match(path) or not values:
                continue
            chooser = f"{choice['path']}.{choice['key']}" if choice else ""
            found[Key(path, f"{chooser}={choice['value']}" if choice else None)] = values
            if choice:
                found.setdefault(Key(chooser, None), []).append(choice["value"])
    return found


def values_of(leaf: Node, known: Node) -> Iterator[str]:
    """Yield values of a key that its schema allows."""
    for kind in alternatives(leaf, known):
        name = kind.get("type")
        if "enum" in kind or "const" in kind:
            yield from map(json.dumps, kind.get("enum", [kind.get("const")]))
        elif name == "duration":
            yield from DURATIONS
        elif name == "boolean":
            yield from ("true", "false")
        elif name == "null":
            yield "null"
        elif name in ("integer", "number"):
            yield from (str(number) for number in (INTEGERS if name == "integer" else NUMBERS) if fits(number, kind))


def fits(number: float, kind: Node) -> bool:
    """Return whether a number is within the bounds of a schema."""
    lowest, highest = kind.get("minimum", number), kind.get("maximum", number)
    above, below = kind.get("exclusiveMinimum", number - 1), kind.get("exclusiveMaximum", number + 1)
    return bool(lowest <= number <= highest and above < number < below)


def drawn(source: random.Random, corpus: Path) -> dict[str, str]:
    """Draw some keys and values, and perhaps a mixture of the corpus with something else."""
    keys = [key for key in pool() if key.path in OFTEN and source.random() < 0.5]
    keys += source.sample([*pool()], source.randint(1, 6))
    overrides: dict[str, str] = {}
    for key in keys:
        overrides |= dict([key.chosen.split("=")]) if key.chosen else {}
        overrides[key.path] = source.choice(pool()[key])
    if source.random() < 0.3:
        overrides["data.train"] = source.choice(MIXTURES).replace("CORPUS", f"path: {corpus}")
    return overrides


def accepted(overrides: dict[str, str], source: random.Random, rehearse: Rehearse) -> dict[str, str]:
    """Return the overrides without those that dry runs refuse, each time one of those that the error names."""
    overrides = dict(overrides)
    while (tried := rehearse(overrides)).returncode:
        assert (tried.returncode, overrides != {}) == (2, True), tried.stderr
        assert "Traceback" not in tried.stderr
        named = [key for key in overrides if key.rpartition(".")[2] in tried.stderr]
        del overrides[source.choice(named or [*overrides])]
    return overrides


def typed(overrides: Mapping[str, str]) -> list[str]:
    """Return overrides as they are typed, and those that all these runs have."""
    fixed = (
        f"train.steps={STEPS}",
        f"checkpoint.interval={HALF}",
        f"train.eval_batches={BATCHES}",
        "checkpoint.keep_last=9",
    )
    return [*(f"{key}={value}" for key, value in overrides.items()), *fixed]


def cut_back(run: Run, name: str) -> None:
    """Copy a run as it was at half its length."""
    copy = Path(shutil.copytree(run.folder, run.folder.with_name(name)))
    shutil.rmtree(copy / "checkpoints" / f"step_{STEPS:08}")
    (copy / "result.json").unlink()


def tolerance(overrides: Mapping[str, str]) -> float:
    """Return how far losses may be apart that are computed in batches of other sizes, or in bf16 and in fp32."""
    in_bf16 = any("bf16" in overrides.get(f"deepspeed.{key}", "") for key in ("precision", "communication_dtype"))
    return 5e-2 if in_bf16 or any(key.startswith("precision.") for key in overrides) else 1e-3


def trained(outcome: Outcome, overrides: Mapping[str, str]) -> Run:
    """Return the run of a training that has to succeed."""
    assert outcome.code == 0, f"{overrides} on {len(outcome.codes)} ranks: {outcome.stderr}"
    assert "Traceback" not in outcome.stderr
    return outcome.run


@pytest.mark.proof
@pytest.mark.parametrize("number", RUNS)
def test_what_a_dry_run_accepts_goes_all_the_way(
    tiny_config: Path,
    run_pretrain: Pretrain,
    start: Start,
    command: Command,
    corpus: Path,
    tmp_path: Path,
    number: int,
) -> None:
    source = random.Random(number)
    drawn_keys, ranks, name = drawn(source, corpus), source.choice((1, 1, 2)), f"random-{number}"
    place = (f"run.root={tiny_config.parent / 'runs'}", f"run.name={name}")
    overrides = accepted(
        drawn_keys, source, lambda keys: command("pretrain", "--config", tiny_config, *place, *typed(keys), "--dry-run")
    )
    outcome = run_pretrain(tiny_config, name, typed(overrides), ranks=ranks)
    whole = trained(outcome, overrides)

    # Interrupted at half its length, it goes on to the same numbers and weights
    cut_back(whole, f"{name}-resumed")
    resumed = trained(run_pretrain(tiny_config, f"{name}-resumed", typed(overrides), ranks=ranks), overrides)
    assert resumed.numbers == whole.numbers, overrides
    before, after = whole.weights(STEPS), resumed.weights(STEPS)
    assert all(torch.equal(before[key], after[key]) for key in before | after), overrides

    # On other ranks and at another stage, if that is served, to about the same losses
    cut_back(whole, f"{name}-elsewhere")
    elsewhere = [*typed(overrides), f"deepspeed.zero_stage={source.randrange(4)}"]
    moved = run_pretrain(tiny_config, f"{name}-elsewhere", elsewhere, ranks=3 - ranks)
    assert moved.code in (0, 2), f"{overrides}, {elsewhere[-1]}: {moved.stderr}"
    if moved.code == 0 and "model.dropout" not in overrides:  # whose masks are those of a rank
        expected = pytest.approx(whole.column("loss"), rel=tolerance(overrides))
        assert moved.run.column("loss") == expected, f"{overrides}, {elsewhere[-1]}"

    def asked(verb: str, *arguments: str | Path) -> Any:
        """Return what a command says as JSON, or None if it refuses the run and may."""
        done = command(verb, *arguments, "--json")
        assert done.returncode in ((0, 2) if verb in MAY_REFUSE else (0,)), f"{verb} after {overrides}: {done.stderr}"
        assert "Traceback" not in done.stderr, f"{verb} after {overrides}: {done.stderr}"
        return json.loads(done.stdout) if done.returncode == 0 else None

    exported = asked("export", "--model", whole.folder, "--output", tmp_path / "export") is not None
    (micro_batch,) = re.findall(r"rank\(s\) x (\d+) sequences", outcome.stdout)
    same_batches = ("--data", corpus, "--batch-size", micro_batch, "--max-batches", str(BATCHES))
    texts = []
    for model in (whole.folder, tmp_path / "export")[: 1 + exported]:
        scored = asked("eval", "--model", model, *same_batches)["loss"]
        assert scored == pytest.approx(whole.column("eval/email/loss")[STEPS], rel=tolerance(overrides)), overrides
        told = asked("generate", "--model", model, "--prompt", "def ", "--max-new-tokens", "8", "--temperature", "1")
        texts += [] if told is None else [told["samples"][0]["text"]]
    assert len(set(texts)) <= 1, overrides
    recipes = ("--recipes", "rtn-w4", "w8a8-token", "kv8", "--max-batches", "2")
    asked("quantize", "--model", whole.folder, "--data", corpus, "--output", tmp_path / "q", *recipes)
    asked("plan", "--config", tiny_config, *place, *typed(overrides))
    asked("report", whole.folder)
    asked("status", whole.folder)
    asked("show", whole.folder, "--step", "2")
    again = start("launcher/replay.py", [whole.folder, "--verify"], whole.folder, ranks=ranks).wait()
    assert again.code == 0, f"replay after {overrides}: {again.stderr or again.stdout}"
