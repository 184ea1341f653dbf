"""What a run wrote is read, or refused by the file, the line and the key that are wrong."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from plumbline.data.damage import DamagedFileError
from plumbline.launcher.replay import parse_arguments
from plumbline.launcher.runtime.config.load import load_config, save_config
from plumbline.launcher.runtime.config.run_files import METRICS
from plumbline.launcher.runtime.replay.record import Difference, contradictions, read_record
from plumbline.launcher.runtime.replay.search import Found
from plumbline.launcher.runtime.replay.spike import Explanation, standings
from plumbline.launcher.runtime.replay.text import spike_lines, verify_facts, verify_lines
from plumbline.launcher.runtime.replay.windows import Verification, Window, windows
from plumbline.launcher.runtime.run.chain import CHAIN, ChainFile, Step
from plumbline.launcher.runtime.run.interventions import INTERVENTIONS, Intervention, write_interventions
from plumbline.launcher.runtime.run.starts import STARTS
from plumbline.launcher.runtime.system.files import write_json_lines
from tests.damage import damage

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 8


def time_of(minute: int) -> str:
    return f"2026-01-01T10:{minute:02}:00+01:00"


def start_at(step: int, ranks: int, **keys: Any) -> dict[str, Any]:
    """Return the line of a start, as many minutes after ten."""
    return {"time": time_of(step), "step": step, "world_size": ranks, "changes": None, **keys}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run of eight steps that saved nothing."""
    steps = [Step(step, f"{step:064x}", 3.0 - 0.1 * step, 0.5) for step in range(1, STEPS + 1)]
    chain = ChainFile(tmp_path, 0)
    for step in steps:
        chain.add_step(step)
    chain.close()
    lines = [{"step": its.step, "tokens": 64, "loss": its.loss, "grad_norm": its.grad_norm} for its in steps]
    write_json_lines(tmp_path / METRICS, [*lines, {"step": STEPS, "tokens": 64, "eval/text/loss": 2.5}])
    write_json_lines(tmp_path / STARTS, [start_at(0, 2), start_at(4, 1)])
    return tmp_path


def test_what_an_honest_run_wrote_is_read(run: Path) -> None:
    record = read_record(run)
    assert contradictions(record) == []
    assert record.logged[3] == {"loss": 3.0 - 0.1 * 3, "grad_norm": 0.5}
    assert sorted(record.logged) == list(range(1, STEPS + 1))
    assert [record.ranks_at(step) for step in (1, 4, 5, 8)] == [2, 2, 1, 1]


@pytest.mark.parametrize(("from_step", "begun", "found"), [(0, 1, False), (4, 5, True), (4, 1, False)])
def test_a_chain_begins_where_its_run_does(run: Path, from_step: int, begun: int, found: bool) -> None:
    """It is written anew here, with hashes that agree: only what is missing tells. A branch begins later."""
    write_json_lines(run / STARTS, [start_at(from_step if begun == 1 else 0, 2)])
    (run / CHAIN).unlink()
    chain = ChainFile(run, 0)
    for step in range(from_step + 1, STEPS + 1):
        chain.add_step(Step(step, f"{step:064x}", 3.0 - 0.1 * step, 0.5))
    chain.close()
    told = [Difference(1, "chain", f"{CHAIN} begins at step {begun}, and the run at step 1")]
    assert contradictions(read_record(run)) == (told if found else [])


def test_steps_that_were_made_again_after_a_return_are_those_of_the_ranks_that_went_back(run: Path) -> None:
    copied, made = (
        Intervention(time, "loss_spike", "the loss is 9", 3, 6, back_to=2, skipped=(2, 6))
        for time in ("2026-01-01T08:59:59+00:00", "2026-01-01T09:05:00+00:00")
    )
    write_interventions(run, [copied, made])
    write_json_lines(run / STARTS, [start_at(0, 2), start_at(4, 1), start_at(6, 4)])
    assert [read_record(run).ranks_at(step) for step in range(1, STEPS + 1)] == [2, 2, 1, 1, 1, 1, 4, 4]
    for damaged, told in (("at nine", ": time = 'at nine': expected a time"), (9, ", line 1: .*time = 9: .* string")):
        write_json_lines(run / INTERVENTIONS, [{**asdict(made), "time": damaged}])
        with pytest.raises(DamagedFileError, match=f"{INTERVENTIONS}{told}"):
            read_record(run)


def test_a_return_stays_where_the_clock_of_an_earlier_host_was_ahead(run: Path) -> None:
    first, second = start_at(0, 2, time="2026-01-01T10:00:00+00:00"), start_at(6, 1)
    write_json_lines(run / STARTS, [first, second])
    made = Intervention(time_of(9), "loss_spike", "the loss is 9", 5, 8, back_to=4, skipped=(4, 8))
    write_interventions(run, [made])
    assert [read_record(run).ranks_at(step) for step in range(1, STEPS + 1)] == [2, 2, 2, 2, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("changed", "windows_of"),
    [
        ({"train.steps": [4, 8]}, [(0, 4, False)]),
        ({"data.micro_batch_size": [2, 4], "world_size": [2, 1]}, [(0, 4, False)]),
        ({"world_size": [2, 1], "checkpoint.interval": [4, 8], "packages.torch": ["2.10", "2.11"]}, [(0, 8, True)]),
        ({"train.eval_interval": [4, 8], "data.validation.0.path": ["a", "b"]}, [(0, 8, True)]),
    ],
)
def test_a_window_ends_where_a_start_changed_what_is_trained(
    run: Path, tiny_config: Path, changed: dict[str, Any], windows_of: list[tuple[int, int, bool]]
) -> None:
    save_config(load_config(tiny_config, []), run / "config.yaml")
    write_json_lines(run / STARTS, [start_at(0, 2), start_at(4, 1, changes=changed)])
    found = windows(read_record(run))
    assert [(its.first, its.last, its.config is not None) for its in found] == windows_of
    kept = load_config(tiny_config, ["optimizer.lr=0.003"])
    line = {"changes": changed, "config": kept.model_dump(mode="json")}
    write_json_lines(run / STARTS, [start_at(0, 2, config=line["config"]), start_at(4, 1, **line)])
    (window,) = windows(read_record(run))
    assert window.config == kept
    left_out = [its for its in found if its.config is None]
    told = [*verify_lines(Verification(read_record(run), [], [], left_out), 1)]
    assert [line for line in told if line.startswith("left out")] == [
        f"left out {its}: a later start changed what is trained, and their configuration is kept nowhere"
        for its in left_out
    ]


@pytest.mark.parametrize("wanted", [0, 1])
def test_a_run_of_which_no_step_could_be_computed_again_is_not_verified(run: Path, wanted: int) -> None:
    found = Verification(read_record(run), [], [], [])
    assert verify_facts(found)["verdict"] == "consistent"
    *_, last = verify_lines(found, wanted)
    assert last == "the records agree with each other, but no step was computed again"


@pytest.mark.parametrize("file", [METRICS, STARTS])
@pytest.mark.parametrize("step", ["two", "absent", None, [1], True, 1.0])
def test_a_line_without_a_step_is_refused(run: Path, file: str, step: Any) -> None:
    damage(run / file, {"step": step})
    with pytest.raises(DamagedFileError, match=rf"{file}, line 1: step = .*: expected a value of type int"):
        read_record(run)


@pytest.mark.parametrize("key", ["loss", "grad_norm"])
@pytest.mark.parametrize("value", ["word", "3.5", None, [1], {"a": 1}, True])
def test_a_loss_that_is_no_number_is_refused(run: Path, key: str, value: Any) -> None:
    damage(run / METRICS, {key: value})
    with pytest.raises(DamagedFileError, match=rf"{METRICS}, line 1: {key} = "):
        read_record(run)


@pytest.mark.parametrize("ranks", ["two", "absent", None])
def test_a_start_without_ranks_is_refused(run: Path, ranks: Any) -> None:
    damage(run / STARTS, {"world_size": ranks})
    with pytest.raises(DamagedFileError, match=rf"{STARTS}, line 1: world_size = "):
        read_record(run)


@pytest.mark.parametrize("step", ["two", None, [1], {"a": 1}, float("inf"), True])
def test_a_line_of_the_chain_without_a_step_is_a_contradiction(run: Path, step: Any) -> None:
    damage(run / CHAIN, {"step": step})
    first = contradictions(read_record(run))[0]
    assert (first.step, first.quantity) == (0, "chain")
    assert first.text.startswith(f"{CHAIN}, line 1: ")


@pytest.mark.parametrize("step", ["two", [1], 2.5])
def test_a_run_goes_on_without_such_a_line(run: Path, step: Any) -> None:
    damage(run / CHAIN, {"step": step})
    ChainFile(run, STEPS).close()
    assert sorted(read_record(run).chain.steps) == list(range(2, STEPS + 1))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--verify", "--full"], "--full goes with --step"),
        (["--step", "3", "--windows", "0"], "--windows goes with --verify"),
        (["--step", "3", "--most-steps", "2"], "--most-steps goes with --verify"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], told: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["replay.py", str(run), *options])
    with pytest.raises(SystemExit, match="2"):
        parse_arguments()
    assert told in capsys.readouterr().err


def test_samples_are_not_blamed_for_a_step_that_is_not_what_the_run_wrote(run: Path) -> None:
    record, step = read_record(run), Step(5, "", 2.5, 0.5)
    standing = standings(record, 5)

    def last_line(difference: Difference | None, causes: list[int]) -> str:
        made = Explanation(Window(0, 4, None, None, None), None, difference, Found(causes, False, 3), [step])
        return [*spike_lines(record, 5, standing, made, [], False)][-1]

    other = Difference(5, "grad_norm", "100.0 in the chain, 0.5 computed again")
    assert "its samples are not to blame: --verify" in last_line(other, [])
    assert "that is a spike still" in last_line(other, [3])
    assert "that is a spike still" in last_line(None, [])


def test_a_spike_in_a_run_of_few_steps_is_refused(run: Path) -> None:
    record = read_record(run)
    assert [its.is_spike for its in standings(record, 3)] == [False, False]
    write_json_lines(run / METRICS, [])
    lines = (run / CHAIN).read_text().splitlines(keepends=True)
    (run / CHAIN).write_text("".join(lines[:4]))
    with pytest.raises(ValueError, match=r"^--step 3: 3 finite numbers of steps around it are too few"):
        standings(read_record(run), 3)
    with pytest.raises(ValueError, match=r"^--step 9: neither chain.jsonl nor metrics.jsonl"):
        standings(read_record(run), 9)
