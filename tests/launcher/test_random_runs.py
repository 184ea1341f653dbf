"""Random configurations that a dry run accepts: they train, resume, and every command takes what they leave.

PLUMBLINE_RANDOM_RUNS=200 makes as many instead of a few. What a dry run refuses loses one of the keys that the error
names, until it is accepted: so refusals are tried as well, each of which must be an error and no traceback.
"""

import json
import os
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from plumbline.launcher.runtime.config.schema import Config
from plumbline.model.attention import ATTENTIONS
from plumbline.model.blocks import BLOCKS
from plumbline.model.families import FAMILIES
from tests.benchmarks.wrong_values import Node, alternatives, leaves
from tests.conftest import Command, Outcome, Pretrain

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


def drawn(source: random.Random) -> dict[str, str]:
    """Draw some keys and values."""
    keys = [key for key in pool() if key.path in OFTEN and source.random() < 0.5]
    keys += source.sample([*pool()], source.randint(1, 6))
    overrides: dict[str, str] = {}
    for key in keys:
        overrides |= dict([key.chosen.split("=")]) if key.chosen else {}
        overrides[key.path] = source.choice(pool()[key])
    return overrides


@pytest.mark.proof
@pytest.mark.parametrize("number", RUNS)
def test_what_a_dry_run_accepts_goes_all_the_way(
    tiny_config: Path, run_pretrain: Pretrain, command: Command, corpus: Path, tmp_path: Path, number: int
) -> None:
    source = random.Random(number)
    overrides, ranks, name = drawn(source), source.choice((1, 1, 2)), f"random-{number}"

    def typed(steps: int) -> list[str]:
        return [*(f"{key}={value}" for key, value in overrides.items()), f"train.steps={steps}"]

    place = (f"run.root={tiny_config.parent / 'runs'}", f"run.name={name}")
    while (tried := command("pretrain", "--config", tiny_config, *place, *typed(3), "--dry-run")).returncode:
        assert (tried.returncode, overrides != {}) == (2, True), tried.stderr
        assert "Traceback" not in tried.stderr
        named = [key for key in overrides if key.rpartition(".")[2] in tried.stderr]
        del overrides[source.choice(named or [*overrides])]

    for steps in (3, 5):
        outcome: Outcome = run_pretrain(tiny_config, name, typed(steps), ranks=ranks)
        assert outcome.code == 0, f"{overrides} on {ranks} ranks: {outcome.stderr}"
        assert "Traceback" not in outcome.stderr

    run = tiny_config.parent / "runs" / name
    for verb, *arguments in (
        ("eval", "--model", run, "--data", corpus, "--max-batches", "2"),
        ("generate", "--model", run, "--prompt", "def ", "--max-new-tokens", "8"),
        ("export", "--model", run, "--output", tmp_path / "export"),
        ("quantize", "--model", run, "--data", corpus, "--output", tmp_path / "q", "--recipes", "rtn-w4", "w8a8-token"),
        ("report", run),
        ("status", run),
        ("show", run, "--step", "2"),
    ):
        done = command(str(verb), *arguments)
        assert done.returncode in ((0, 2) if verb in MAY_REFUSE else (0,)), f"{verb} after {overrides}: {done.stderr}"
        assert "Traceback" not in done.stderr, f"{verb} after {overrides}: {done.stderr}"
