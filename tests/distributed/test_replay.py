"""replay.py says of an honest run that it is what it wrote, to the last bit, and finds what was tampered with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from plumbline.data.loader import TrainBatches
from plumbline.data.skipped import NOTHING
from plumbline.launcher.runtime.checkpoint.store import MANIFEST
from plumbline.launcher.runtime.checkpoint.tensors import shard_name
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.engine.make import make_engine
from plumbline.launcher.runtime.replay.record import contradictions, read_record
from plumbline.launcher.runtime.replay.steps import Replay, Stash
from plumbline.launcher.runtime.replay.windows import recompute, windows
from plumbline.launcher.runtime.run.chain import BEGIN, CHAIN, linked, manifest_hash
from plumbline.launcher.runtime.run.inputs import open_inputs
from plumbline.launcher.runtime.system.signals import StopRequest
from plumbline.launcher.runtime.train.train import train
from tests.conftest import REPOSITORY, written
from tests.damage import reseal

if TYPE_CHECKING:
    from plumbline.launcher.runtime.engine.base import Engine
    from plumbline.launcher.runtime.ranks.world import World
    from tests.conftest import Pretrain, Run, Start

STEPS, INTERVAL, RANKS = 12, 4, 2
SETTINGS = [
    f"train.steps={STEPS}",
    f"checkpoint.interval={INTERVAL}",
    "checkpoint.keep_last=3",
    "train.eval_interval=null",
    "train.ema_half_life_tokens=2000",
    "model.dropout=0.1",
    "deepspeed.zero_stage=2",
]


@pytest.fixture(scope="module")
def run(run_pretrain: Pretrain, tiny_config: Path) -> Run:
    outcome = run_pretrain(tiny_config, "honest", SETTINGS, ranks=RANKS)
    assert outcome.code == 0, outcome.stderr
    return outcome.run


@pytest.fixture(scope="module")
def alone(run_pretrain: Pretrain, tiny_config: Path) -> Run:
    """Return a run of one process, whose random numbers no rank draws."""
    outcome = run_pretrain(tiny_config, "alone", [*SETTINGS, "model.dropout=0.0", "train.steps=6"])
    assert outcome.code == 0, outcome.stderr
    return outcome.run


@pytest.fixture
def copy(run: Run, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run.folder, tmp_path / "copy"))


Verify = Callable[..., dict[str, Any]]


@pytest.fixture
def verify(start: Start) -> Verify:
    """Run replay.py --verify on all windows; returns its JSON document, with its exit code."""

    def run(folder: Path, *options: str, ranks: int = RANKS, launcher: str = "ranks") -> dict[str, Any]:
        words = [folder, "--verify", "--json", "--windows", "9", *options]
        outcome = start("launcher/replay.py", words, folder, ranks=ranks, launcher=launcher).wait()
        begins = outcome.stdout.index("{\n")  # behind what a launcher prints
        document: dict[str, Any] = json.JSONDecoder().raw_decode(outcome.stdout, begins)[0]
        return {**document, "code": outcome.code}

    return run


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step_{step:08d}"


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def put(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def alter(file: Path, place: tuple[str, int], **values: Any) -> None:
    """Write other values into the line of a step, or of a checkpoint."""
    lines = lines_of(file)
    line = next(line for line in lines if line.get(place[0]) == place[1] and values.keys() <= line.keys())
    line.update(values)
    put(file, lines)


def link_anew(folder: Path) -> None:
    """Give all lines of a chain hashes that fit, as somebody does who wants to deceive."""
    head, lines = BEGIN, []
    for line in lines_of(folder / CHAIN):
        del line["hash"]
        lines.append(linked(head, line))
        head = lines[-1]["hash"]
    put(folder / CHAIN, lines)


def test_an_honest_run_is_verified_to_the_last_bit(run: Run, verify: Verify) -> None:
    before = written(run.folder)
    found = verify(run.folder)
    assert (found["code"], found["verdict"], found["contradictions"]) == (0, "verified", [])
    assert [(its["first"], its["last"], its["steps"]) for its in found["windows"]] == [(0, 4, 4), (4, 8, 4), (8, 12, 4)]
    assert all(its["tolerance"] is None and its["end"] for its in found["windows"])
    assert found["head"] == lines_of(run.folder / CHAIN)[-1]["hash"]
    assert found["checkpoints"] == [4, 8, 12]
    assert written(run.folder) == before


def test_a_run_is_verified_under_the_launcher_of_deepspeed(run: Run, verify: Verify) -> None:
    found = verify(run.folder, launcher="deepspeed")
    assert (found["code"], found["verdict"]) == (0, "verified")
    assert [(its["tolerance"], its["steps"]) for its in found["windows"]] == [(None, 4)] * 3


def test_what_any_ranks_write_is_verified_to_the_last_bit_on_others(
    run_pretrain: Pretrain, tiny_config: Path, verify: Verify
) -> None:
    trained = run_pretrain(tiny_config, "any", [*SETTINGS, "run.reproducible=any_ranks"], ranks=2)
    for ranks in (1, 4):
        found = verify(trained.run.folder, ranks=ranks)
        assert (found["code"], found["verdict"]) == (0, "verified"), found
        assert all(its["tolerance"] is None and its["steps"] == 4 for its in found["windows"])


def test_anchors_are_the_same_on_another_number_of_ranks(
    run_pretrain: Pretrain, tiny_config: Path, verify: Verify
) -> None:
    thoughts = ["objective.name=latent_lookahead", "objective.anchor_policy=random", "objective.anchors=2"]
    trained = run_pretrain(tiny_config, "thinks", [*SETTINGS, "model.dropout=0.0", "train.steps=6", *thoughts])
    assert trained.code == 0, trained.stderr
    found = verify(trained.run.folder, "--most-steps", "2")
    assert (found["code"], found["verdict"]) == (0, "verified"), found
    assert all(its["tolerance"] == 1e-3 for its in found["windows"])


def test_on_another_number_of_ranks_samples_are_exact_and_numbers_near(
    alone: Run, verify: Verify, tmp_path: Path
) -> None:
    found = verify(alone.folder, "--most-steps", "3")
    assert (found["code"], found["verdict"]) == (0, "verified")
    assert [(its["steps"], its["end"] is None) for its in found["windows"]] == [(3, True), (2, False)]
    assert all(its["tolerance"] == 1e-3 for its in found["windows"])
    altered = Path(shutil.copytree(alone.folder, tmp_path / "altered"))
    alter(altered / CHAIN, ("step", 2), loss=5.4)
    found = verify(altered, "--most-steps", "3")
    assert [its["difference"] and its["difference"]["quantity"] for its in found["windows"]] == ["loss", None]


OTHERS = {
    "stage_3": ["deepspeed.zero_stage=3"],
    "stage_3_bf16_muon": ["deepspeed.zero_stage=3", "deepspeed.precision=bf16", "optimizer.name=muon"],
    "offload": ["deepspeed.zero_stage=2", "deepspeed.offload_optimizer=true"],
    "stage_0_soap": ["deepspeed.zero_stage=0", "deepspeed.precision=bf16", "optimizer.name=soap"],
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_engines_are_verified_to_the_last_bit(
    run_pretrain: Pretrain, tiny_config: Path, verify: Verify, name: str
) -> None:
    trained = run_pretrain(tiny_config, name, [*SETTINGS, *OTHERS[name]], ranks=RANKS)
    assert trained.code == 0, trained.stderr
    found = verify(trained.run.folder)
    assert (found["code"], found["verdict"]) == (0, "verified"), found
    assert [(its["steps"], its["tolerance"], its["end"] is None) for its in found["windows"]] == [(4, None, False)] * 3


ALTERED = {
    "a_model": ("model/mlp.py", '"swiglu": F.silu', '"swiglu": F.gelu', [(1, "loss"), (5, "loss")]),
    "an_optimizer": (
        *("launcher/runtime/optim/optimizer.py", '= base_lr * group["lr_multiplier"]'),
        *('= base_lr * group["lr_multiplier"] * 1.001', [(2, "loss"), (6, "loss")]),
    ),
    "an_average": (
        *("launcher/runtime/optim/moving_average.py", "rate = math.log(2) /", "rate = math.log(2.01) /"),
        [(4, "weights"), (6, "weights")],
    ),
}
"""What -> file, text, what takes its place, and the first step and quantity of each window that must differ then."""


@pytest.mark.parametrize("what", ALTERED)
def test_code_that_was_altered_is_found(alone: Run, start: Start, tmp_path: Path, what: str) -> None:
    """By a copy of this code, in which one constant is another."""
    file, old, new, expected = ALTERED[what]
    for folder in ("launcher", "model", "data"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    text = (tmp_path / file).read_text()
    assert text.count(old) == 1
    (tmp_path / file).write_text(text.replace(old, new))
    words = [alone.folder, "--verify", "--json", "--windows", "9"]
    outcome = start(tmp_path / "launcher" / "replay.py", words, alone.folder, launcher="python", fresh=True).wait()
    assert outcome.code == 1, outcome.stderr
    found = json.loads(outcome.stdout)
    assert (found["verdict"], found["contradictions"]) == ("differs", [])
    assert [(its["difference"]["step"], its["difference"]["quantity"]) for its in found["windows"]] == expected
    assert (found["first"]["step"], found["first"]["quantity"]) == expected[0]


def test_a_run_that_draws_by_rank_is_computed_again_on_as_many(run: Run, start: Start) -> None:
    outcome = start("launcher/replay.py", [run.folder, "--verify"], run.folder).wait()
    assert outcome.code == 2
    assert "can be computed again on 2 alone" in outcome.stderr


def put_a_loss_into_the_chain(folder: Path) -> None:
    alter(folder / CHAIN, ("step", 7), loss=2.5)
    link_anew(folder)


def lose_the_end(folder: Path) -> None:
    lines = lines_of(folder / CHAIN)
    put(folder / CHAIN, [line for line in lines if line.get("step", 0) <= 10])
    link_anew(folder)


def flip_last_byte(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def forget_a_checkpoint(folder: Path) -> None:
    put(folder / CHAIN, [line for line in lines_of(folder / CHAIN) if line.get("checkpoint") != 8])
    link_anew(folder)


def replace_a_checkpoint(folder: Path) -> None:
    """Put weights of another step into a checkpoint, with a manifest that fits them."""
    place = checkpoint(folder, 8)
    for rank in range(RANKS):
        shutil.copy(checkpoint(folder, 4) / shard_name(rank), place / shard_name(rank))
        reseal(place / shard_name(rank))


RECORDS: dict[str, tuple[Callable[[Path], object], tuple[int, str]]] = {
    "logged_loss": (lambda folder: alter(folder / "metrics.jsonl", ("step", 6), loss=2.5), (6, "loss")),
    "logged_norm": (
        lambda folder: alter(folder / "metrics.jsonl", ("step", 6), grad_norm=0.5),
        (6, "grad_norm"),
    ),
    "loss_in_the_chain": (lambda folder: alter(folder / CHAIN, ("step", 7), loss=2.5), (7, "chain")),
    "loss_in_a_chain_that_fits": (put_a_loss_into_the_chain, (7, "loss")),
    "end_of_the_chain": (lose_the_end, (12, "chain")),
    "checkpoint_in_the_chain": (forget_a_checkpoint, (8, "checkpoint")),
    "weights": (lambda folder: flip_last_byte(checkpoint(folder, 8) / shard_name(1)), (8, "checkpoint")),
    "weights_and_manifest": (replace_a_checkpoint, (8, "checkpoint")),
}


@pytest.mark.parametrize("name", RECORDS)
def test_records_that_contradict_each_other_are_found(copy: Path, name: str) -> None:
    tamper, (step, quantity) = RECORDS[name]
    assert contradictions(read_record(copy, contents=True)) == []
    tamper(copy)
    first = contradictions(read_record(copy, contents=True))[0]
    assert (first.step, first.quantity) == (step, quantity)


@pytest.fixture
def token_altered(run: Run) -> Iterator[tuple[int, str]]:
    """Alter the last token of a sample of step 6 in the corpus, and put it back afterwards."""
    config = load_config(run.folder / "config.yaml", [])
    batches = TrainBatches(config.data, config.run.seed)
    row = batches.micro_batches(5)[0]["input_ids"][0].numpy().astype("uint16").tobytes()
    corpus = Path(config.data.train[0].paths[0])
    (shard,) = [file for file in corpus.rglob("*.bin") if row in file.read_bytes()]
    before = shard.read_bytes()
    assert before.count(row) == 1
    place = before.index(row) + len(row) - 2
    shard.write_bytes(before[:place] + bytes([before[place] ^ 1]) + before[place + 1 :])
    yield 6, "samples"
    shard.write_bytes(before)


def test_a_token_of_the_corpus_is_found(run: Run, verify: Verify, token_altered: tuple[int, str]) -> None:
    found = verify(run.folder)
    assert (found["code"], found["contradictions"]) == (1, [])
    assert (found["first"]["step"], found["first"]["quantity"]) == token_altered
    assert [its["steps"] for its in found["windows"]] == [4, 1, 4]


def test_a_loss_that_is_wrong_everywhere_is_found(copy: Path, verify: Verify) -> None:
    """By one bit, in metrics.jsonl and in a chain whose hashes fit."""
    loss = next(line["loss"] for line in lines_of(copy / CHAIN) if line.get("step") == 10)
    for file in ("metrics.jsonl", CHAIN):
        alter(copy / file, ("step", 10), loss=loss * (1 + 2**-52))
    link_anew(copy)
    found = verify(copy)
    assert (found["code"], found["contradictions"]) == (1, [])
    assert (found["first"]["step"], found["first"]["quantity"]) == (10, "loss")


def test_a_state_that_is_wrong_everywhere_is_found(copy: Path, verify: Verify) -> None:
    """Of one element, with a manifest and a chain that fit."""
    place, name = checkpoint(copy, 8), shard_name(1)
    tensors = load_file(place / name)
    key = next(key for key in tensors if key.startswith("exp_avg_sq/"))
    tensors[key].view(-1)[0] *= 1 + 2**-20
    with safe_open(place / name, framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, place / name, metadata)
    reseal(place / name)
    alter(copy / CHAIN, ("checkpoint", 8), manifest=manifest_hash(place / MANIFEST))
    link_anew(copy)
    found = verify(copy)
    assert (found["code"], found["contradictions"]) == (1, [])
    assert (found["first"]["step"], found["first"]["quantity"]) == (8, "weights")
    assert found["first"]["text"].startswith(key)


def test_a_replay_comes_back_to_where_it_stood(tiny_config: Path, world: World) -> None:
    replay = Replay(load_config(tiny_config, ["deepspeed.zero_stage=2"]), NOTHING, world)
    replay.go_to(None)
    replay.make(replay.batches())
    stash, made = Stash(replay), []
    for _ in range(3):
        stash.restore()
        made.append([replay.make(replay.batches()) for _ in range(3)])
    assert made == made[:1] * 3


def test_a_folder_without_a_chain_is_refused(copy: Path) -> None:
    (copy / CHAIN).unlink()
    with pytest.raises(ValueError, match=r"chain.jsonl: not there"):
        read_record(copy)


@pytest.mark.parametrize(
    ("settings", "later"),
    [
        (["schedule.name=cosine"], ["train.steps=12"]),
        ([], ["train.steps=12", "optimizer.lr=0.001", "data.micro_batch_size=4"]),
    ],
)
def test_a_run_that_went_on_otherwise_is_verified_by_the_configuration_of_each_start(
    tiny_config: Path, tmp_path: Path, world: World, settings: list[str], later: list[str]
) -> None:
    for overrides in ([], later):
        kept = [*SETTINGS, "train.steps=6", "checkpoint.keep_last=1", *settings, *overrides, f"run.root={tmp_path}"]
        config = load_config(tiny_config, kept)
        assert train(config, open_inputs(config, world), world, StopRequest())
    record = read_record(config.run.folder)
    (verdict,) = recompute(record, windows(record), world)
    assert (verdict.window.first, verdict.window.last, verdict.steps, verdict.difference) == (0, 6, 6, None)


def test_one_engine_at_a_time_is_held_where_configurations_differ(
    tiny_config: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(tiny_config, [*SETTINGS, "train.steps=3", f"run.root={tmp_path}"])
    assert train(config, open_inputs(config, world), world, StopRequest())
    held: list[int] = [0]

    def make_one(*arguments: Any, **named: Any) -> Engine:
        held.append(held[-1] + 1)
        return make_engine(*arguments, **named)

    monkeypatch.setattr("plumbline.launcher.runtime.replay.steps.make_engine", make_one)
    monkeypatch.setattr(DeepSpeedEngine, "close", lambda _engine: held.append(held[-1] - 1))
    (window,) = windows(read_record(config.run.folder))
    other = replace(window, config=config.model_copy(update={"run": config.run.model_copy(update={"name": "other"})}))
    verdicts = recompute(read_record(config.run.folder), [window, other, window], world)
    assert [verdict.difference for verdict in verdicts] == [None] * 3
    assert held == [0, 1, 0, 1, 0, 1]


def test_a_damaged_checkpoint_that_was_made_again_is_the_one_that_the_chain_names(
    tiny_config: Path, tmp_path: Path, world: World
) -> None:
    def trained(steps: int) -> Path:
        config = load_config(tiny_config, [*SETTINGS, f"run.root={tmp_path}", f"train.steps={steps}"])
        assert train(config, open_inputs(config, world), world, StopRequest())
        return config.run.folder

    shard = checkpoint(trained(8), 8) / shard_name(0)
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    folder = trained(12)
    record = read_record(folder, contents=True)
    assert sorted(record.chain.checkpoints) == [4, 8, 12]
    assert contradictions(record) == []


def test_killed_and_resumed_writes_the_same_chain(
    run: Run, start_pretrain: Start, run_pretrain: Pretrain, tiny_config: Path, tmp_path: Path
) -> None:
    """Under the same name, which is in every manifest; so the other run makes room."""
    whole = Path(shutil.move(run.folder, tmp_path / "whole"))
    job = start_pretrain(tiny_config, "honest", SETTINGS, ranks=RANKS)
    job.wait_until(lambda: "step_00000004" in job.run.checkpoints and max(job.run.column("loss"), default=0) >= 6)
    job.kill()
    assert not (job.run.folder / "result.json").exists()
    outcome = run_pretrain(tiny_config, "honest", SETTINGS, ranks=RANKS)
    assert outcome.code == 0, outcome.stderr
    assert "resuming after step" in outcome.stdout
    assert (outcome.run.folder / CHAIN).read_bytes() == (whole / CHAIN).read_bytes()
    assert contradictions(read_record(outcome.run.folder, contents=True)) == []
