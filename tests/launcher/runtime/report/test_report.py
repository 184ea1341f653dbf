"""The report finds what is wrong with a run and nothing else, and reads any run folder or says why not."""

from __future__ import annotations

import json
import re
import sys
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import yaml

from plumbline.data.tasks.candidates import SCORES
from plumbline.data.tasks.task import OwnScore
from plumbline.launcher import report
from plumbline.launcher.runtime.commands.cli import duration
from plumbline.launcher.runtime.report.alerts import ADVICE, Alert, find_alerts, loss_spikes, trend_alerts
from plumbline.launcher.runtime.report.facts import read_facts, scores, state
from plumbline.launcher.runtime.report.history import Floats, Series, read_history
from plumbline.launcher.runtime.report.page import page, summary
from plumbline.launcher.runtime.run.interventions import Intervention, write_interventions
from tests.launcher.runtime.report.pages import Page

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.conftest import Command, Pretrain, Run

PNG = b"\x89PNG"


def series(values: Floats, first: int = 100) -> Series:
    """Return one value every 100 steps of 1000 tokens."""
    steps = first + 100 * np.arange(len(values), dtype=np.float64)
    return Series(steps, steps * 1000, values)


def kurtosis(count: int = 40, noise: float = 0.02, power: float = 0.4, seed: int = 0) -> Floats:
    """Return a sub-linear trend: 2 tokens^power, with noise."""
    tokens = np.arange(1, count + 1) * 1e5
    return np.asarray(2 * (tokens / 1e5) ** power * np.exp(noise * np.random.default_rng(seed).standard_normal(count)))


def noisy_loss(count: int = 300, seed: int = 0) -> Floats:
    steps = np.arange(1, count + 1)
    return np.asarray(3 + 6 / np.sqrt(steps) + 0.05 * np.random.default_rng(seed).standard_normal(count))


@pytest.mark.parametrize("seed", range(20))
def test_a_run_on_its_trend_gives_no_alert(seed: int) -> None:
    assert trend_alerts("kurt", series(kurtosis(seed=seed))) == []
    assert loss_spikes(series(noisy_loss(seed=seed))) == []


def test_kurtosis_that_leaves_its_trend_is_reported_where_it_does() -> None:
    values = kurtosis()
    values[30:] *= np.linspace(1.0, 4.0, 10)
    (alert,) = trend_alerts("stream/kurt/03", series(values))
    assert alert.kind == "trend"
    assert alert.key == "stream/kurt/03"
    assert 3200 <= alert.step <= 3500
    assert trend_alerts("kurt", series(1 / values)) == [], "falling below it harms nobody"


def test_one_odd_observation_is_not_a_departure() -> None:
    values = kurtosis()
    values[30] *= 10
    assert trend_alerts("kurt", series(values)) == []
    assert trend_alerts("kurt", series(values[:9])) == [], "too few to know a trend"


def test_a_loss_spike_is_reported_once() -> None:
    values = noisy_loss()
    values[200:205] += 2
    (alert,) = loss_spikes(series(values, first=1))
    assert (alert.kind, alert.step) == ("loss_spike", 20001)


def write_run(folder: Path, *records: Mapping[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps({"tokens": 100, **record}) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def test_numbers_that_are_not_finite_and_skipped_updates_are_reported(tmp_path: Path) -> None:
    losses = [{"step": step, "loss": 3.0, "grad_norm": 1.0} for step in (1, 2)]
    broken = [{"step": 3, "loss": float("nan"), "grad_norm": float("inf"), "skipped": True}, {"step": 4, "loss": 3.0}]
    assert find_alerts(read_history(write_run(tmp_path, *losses))) == []
    alerts = find_alerts(read_history(write_run(tmp_path, *losses, *broken)))
    assert {(alert.kind, alert.key, alert.step) for alert in alerts} == {
        ("non_finite", "loss", 3),
        ("non_finite", "grad_norm", 3),
        ("skipped", "grad_norm", 3),
    }


def test_every_kurtosis_of_every_block_is_watched(tmp_path: Path) -> None:
    good, bad = kurtosis(), kurtosis()
    bad[25:] *= 5
    watched = ["stream/kurt/head", "gemm_in/kurt_qkv/01", "attn_in/kurt_q/01", "attn_in/kurt_k/01", "attn_in/kurt_v/01"]
    keys = {"stream/kurt/00": good, **dict.fromkeys(watched, bad), "attn/max_logit/00": bad}
    records = [
        {"step": 10 * i, "tokens": 1000 * i, **{key: values[i - 1] for key, values in keys.items()}}
        for i in range(1, 41)
    ]
    alerts = find_alerts(read_history(write_run(tmp_path, *records)))
    assert {alert.key for alert in alerts} == set(watched)
    assert {alert.step for alert in alerts} == {260}


def test_the_first_update_of_another_size_than_at_the_base_is_reported(tmp_path: Path) -> None:
    ratios = {1: 1.2, 2: 0.7, 4: 0.0}
    records = [{"step": step, "transfer/embedding": ratio, "transfer/qk_norm": 1.0} for step, ratio in ratios.items()]
    (alert,) = find_alerts(read_history(write_run(tmp_path, *records)))
    assert (alert.kind, alert.key, alert.step) == ("size", "transfer/embedding", 2)
    assert "0.7 times" in alert.message


def test_a_complete_run_that_ends_above_guessing_is_reported(tmp_path: Path) -> None:
    folder = write_run(tmp_path, {"step": 1, "loss": 6.0}, {"step": 2, "loss": 9.0})
    assert find_alerts(read_history(folder), 1024) == [], "it may come down"
    (folder / "result.json").write_text('{"step": 2}')
    (alert,) = find_alerts(read_history(folder), 1024)
    assert (alert.kind, alert.key, alert.step) == ("diverged", "loss", 2)
    assert alert.message.startswith("loss 9 is above that of guessing (ln(vocab_size) = 6.931)")
    assert find_alerts(read_history(folder), 4096) == [], "less than a nat above"
    assert find_alerts(read_history(folder)) == []


def test_a_place_is_never_shown_with_an_older_number(tmp_path: Path) -> None:
    records: list[Mapping[str, object]] = [
        {"step": 10, "stream/kurt/00": 3.0, "stream/kurt/01": 4.0, "gain/max_norm/00": 1.0, "eval/a/loss": 2.0},
        {"step": 20, "stream/kurt/00": 5.0, "stream/kurt/01": None},
        {"step": 30, "loss": 2.0},
    ]
    assert summary(read_history(write_run(tmp_path, *records)), [])["by_place"] == {
        "gain/max_norm": {"step": 10, "last": {"00": 1.0}},
        "stream/kurt": {"step": 20, "last": {"00": 5.0, "01": None}},
    }
    broken = write_run(tmp_path, {"step": 10, "stream/kurt/00": float("nan")})
    assert summary(read_history(broken), [])["by_place"]["stream/kurt"]["last"] == {"00": None}


@pytest.fixture(scope="module")
def run(run_pretrain: Pretrain, tiny_config: Path) -> Run:
    outcome = run_pretrain(tiny_config, "reported", ["metrics.diagnostics_interval=2"])
    assert outcome.code == 0, outcome.stderr
    return outcome.run


@pytest.fixture(scope="module")
def reported(run: Run, command: Command, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Return what the command says of the run, and its page."""
    output = tmp_path_factory.mktemp("report") / "page.html"
    done = command("report", run.folder, "--output", output, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), output.read_text()


def test_a_real_run_becomes_one_page_that_needs_nothing_else(run: Run, reported: tuple[dict[str, Any], str]) -> None:
    facts, text = reported
    assert facts["step"] == 20
    assert facts["complete"] is True
    assert facts["last"]["loss"] == run.column("loss")[20]
    assert facts["last"]["eval/email/w8a8_delta"] == run.column("eval/email/w8a8_delta")[20]
    kurtosis = facts["by_place"]["stream/kurt"]
    assert kurtosis["step"] == 20
    observed = next(record for record in reversed(run.records) if "stream/kurt/00" in record)
    assert len(kurtosis["last"]) > 1
    assert all(observed[f"stream/kurt/{place}"] == value for place, value in kurtosis["last"].items())
    assert {"attn/entropy", "branch/ratio_mlp", "gain/mean_self_attn.q_norm"} <= set(facts["by_place"])
    assert not any(key.startswith("eval/") for key in facts["by_place"])
    shown = Page(text)
    assert all(image.startswith(PNG) for image in shown.images)
    assert not shown.outside
    assert shown.titles == [
        *("Run", "Loss and rate", "Signal propagation", "Attention", "Branches and gradients", "Outliers", "Logits"),
        *("Speed", "Gains", "Updates", "Alerts"),
    ], "in reading order"
    diagnostics = {key.rpartition("/")[0] if key.count("/") == 2 else key for key in observed} - {"step", "tokens"}
    gains = {f"gain/*_{key.removeprefix('gain/mean_')}" for key in diagnostics if key.startswith("gain/mean_")}
    assert {key for key in diagnostics if not key.startswith("gain/")} | gains <= set(shown.keys)


def test_a_page_says_first_what_run_it_is(run: Run, reported: tuple[dict[str, Any], str]) -> None:
    text, result = reported[1], json.loads((run.folder / "result.json").read_text())
    shown = Page(text)
    attempt = json.loads((run.folder / "attempts.jsonl").read_text())
    assert shown.facts["state"] == "complete"
    count = sum(weight.numel() for weight in run.weights(20).values())
    assert shown.facts["size"].startswith(f"{count:,} parameters, ")
    assert shown.facts["parameterization"] == "completep, 2 x the base's width, 2 x its depth"
    assert "corpora" in shown.facts["data"]
    assert shown.facts["batch"] == "8 sequences of 32 tokens = 256 tokens a step"
    assert shown.facts["machine"].startswith(f"{attempt['ranks']} rank(s); {attempt['host']}: ")
    assert "train.eval_interval" not in shown.facts["command"]
    assert "metrics.diagnostics_interval=2" in shown.facts["command"]
    assert shown.facts["duration"].startswith(f"{duration(sum(attempt['seconds'].values()))} in 1 start(s), ")
    assert shown.facts["steps"] == "20 of 20"
    assert shown.facts["tokens"].startswith(f"5,120, {5120 / count:.3g} for each parameter")
    assert f'<td>email</td><td class="number">{result["eval/email/loss"]:.4f}</td>' in text
    assert "Final scores" in text


def test_shares_of_the_data_that_change_are_those_of_the_beginning(run: Run, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "mixed", {"step": 1, "loss": 3.0})
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    (source,) = config["data"]["train"]
    changes = [{"tokens": 1024, "weight": 9.0}]

    def data(**more: object) -> str:
        config["data"]["train"] = [{**source, "weight": 3.0}, {**source, "name": "other", **more}]
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        return Page(page(read_history(folder), read_facts(folder), [])).facts["data"]

    assert data().endswith(" 25%")
    assert data(weight_changes=changes).endswith(" 25% at first (show.py RUN counts the samples of each)")
    assert "at first" in data(max_epochs=2.0)


def test_samples_are_shown_and_do_not_become_markup(tmp_path: Path) -> None:
    folder = write_run(tmp_path, {"step": 1, "loss": 3.0})
    (folder / "samples.txt").write_bytes(b"=== 'a'\na <script> \xff" + b"x" * 9000)
    text = page(read_history(folder), read_facts(folder), [])
    assert "a &lt;script&gt; \ufffdxxx" in text
    assert "characters more" in text


def test_a_run_without_diagnostics_that_goes_on_is_reported_as_far_as_it_is(
    run: Run, command: Command, tmp_path: Path
) -> None:
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in lines if '"loss"' in line][:7]
    (tmp_path / "metrics.jsonl").write_text("\n".join(steps) + '\n{"step": 8, "lo')
    done = command("report", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "0 alert(s)" in done.stdout
    shown = Page((tmp_path / "report.html").read_text())
    assert shown.titles == ["Run", "Loss and rate", "Speed", "Alerts"]
    assert shown.facts["state"] == "not complete"
    assert shown.facts["steps"] == "7"


def test_a_number_that_nobody_foresaw_is_on_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path, {"step": 1, "loss": 3.0, "new": 1.0, "other/of_block/00": 2.0})
    shown = Page(page(read_history(folder), read_facts(folder), []))
    assert shown.titles == ["Run", "Loss and rate", "Others", "Alerts"]
    assert {"new", "other/of_block"} <= set(shown.keys)


def test_every_kind_of_alert_says_what_to_do(tmp_path: Path) -> None:
    bad = kurtosis()
    bad[25:] *= 5
    losses = noisy_loss(40)
    losses[36] += 5
    records: list[dict[str, object]] = [
        {"step": i, "tokens": 1000 * i, "loss": losses[i - 1], "stream/kurt/00": bad[i - 1]} for i in range(1, 41)
    ]
    records[30] |= {"skipped": True, "grad_norm": float("inf"), "transfer/embedding": 4.0}
    folder = write_run(tmp_path / "a run", *records)
    made = Intervention("2026-01-01T00:00:00+00:00", "non_finite", "nan", 22, 23, back_to=20, skipped=(21, 23))
    write_interventions(folder, [made])
    (folder / "result.json").write_text('{"step": 40}')
    history = read_history(folder)
    alerts = find_alerts(history, vocab_size=2)
    text = page(history, read_facts(history.folder), alerts)
    assert {alert.kind for alert in alerts} == set(ADVICE)
    last = text[text.index('id="alerts"') :]
    for kind, advice in ADVICE.items():
        step = next(alert.step for alert in alerts if alert.kind == kind)
        assert escape(advice.text) in last
        if advice.command:
            assert escape(f"show.py '{history.folder}' --step {step} --loss") in last
    assert '<td class="number">37</td><td class="number">37,000</td>' in last, "of the spike, step and tokens"
    assert "went back to step 20, without the data of steps 22 to 23" in last


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (None, "no metrics.jsonl"),
        ("", "holds no numbers yet"),
        ('{"step": 1, "tokens": 5, "loss": 3.0}\nnonsense\n{"step": 2, "tokens": 9, "loss": 3.0}\n', "line 2"),
        ('{"step": "one", "tokens": 5}\n{"step": 2, "tokens": 9, "loss": 3.0}\n', "step = 'one'"),
        ('{"step": 1, "tokens": 5, "loss": 3.0}\n{"tokens": 9, "loss": 3.0}\n', "line 2: step = None is not a number"),
        ('{"step": true, "tokens": 5, "loss": 3.0}\n', "line 1: step = True is not a number of steps"),
        ('{"step": 1, "tokens": -5, "loss": 3.0}\n', "line 1: tokens = -5 is not a number of tokens"),
        ('{"step": 1, "tokens": 5, "loss": 1%s}\n' % ("0" * 400), "line 1: an integer beyond every float"),
        ('{"step": 1, "tokens": 5, "x": %s\n{}\n' % ("[" * 100_000), "line 1: not JSON"),
        ('{"step": 1, "tokens": 5, "loss": 3.0}\n{"step": 2, "l\udcff": 3}\n{}\n', "line 2: not JSON ('utf-8'"),
        ('{"step": 2, "tokens": 5, "loss": 3.0}\n' * 2, "line 2: loss of step 2 after that of step 2"),
        ('[1, 2]\n{"step": 2, "tokens": 9, "loss": 3.0}\n', "a list"),
    ],
)
def test_what_is_not_a_run_is_refused(tmp_path: Path, lines: str | None, message: str) -> None:
    if lines is not None:
        (tmp_path / "metrics.jsonl").write_bytes(lines.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read_history(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    "content", [b'{"step": 1', b"[1]", b'{"a": "\xff"}', b"", b"[" * 100_000, b'{"a": 1%s}' % (b"0" * 400)]
)
@pytest.mark.parametrize("name", ["result.json", "environment.json"])
def test_a_damaged_file_is_one_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes
) -> None:
    folder = write_run(tmp_path / "run", {"step": 1, "loss": 3.0})
    (folder / name).write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["report.py", str(folder)])
    if name == "environment.json" and content.startswith(b'{"a": 1'):
        report.main()
        return
    with pytest.raises(ValueError, match=re.escape(f"{folder / name}: ")):
        report.main()
    assert not (folder / "report.html").exists()


def test_a_result_without_examples_has_no_interval(tmp_path: Path) -> None:
    folder = write_run(tmp_path, {"step": 1, "loss": 3.0})
    (folder / "result.json").write_text('{"eval/x/exact_match": NaN, "eval/x/examples": 0}')
    assert '<td class="number">nan%</td>' in page(read_history(folder), read_facts(folder), [])


def test_a_run_that_was_made_longer_is_not_complete_by_its_old_result(tmp_path: Path) -> None:
    scored = [{"step": step, "tokens": step, "eval/x/loss": loss} for step, loss in ((4, 3.0), (8, 2.0))]
    folder = write_run(tmp_path / "run", scored[0])
    (folder / "result.json").write_text(json.dumps(scored[0]))
    assert scores(read_history(folder)) == {"x": {"loss": "3.0000"}}
    write_run(folder, *scored, {"step": 9, "tokens": 9, "loss": 2.0})
    history = read_history(folder)
    assert (state(history, read_facts(folder)), scores(history)) == ("not complete", {"x": {"loss": "2.0000"}})


def test_a_configuration_of_another_version_costs_its_rows_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path, {"step": 1, "loss": 3.0})
    (folder / "config.yaml").write_text("model: {hidden_width: 64}\n")
    shown = Page(page(read_history(folder), read_facts(folder), []))
    assert "size" not in shown.facts
    assert "warning: size, data and settings are not shown: " in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_one_error_and_no_page(command: Command, tmp_path: Path) -> None:
    done = command("report", tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path}: no metrics.jsonl there; give a run folder, such as runs/quickstart\n"
    assert not (tmp_path / "report.html").exists()
    (tmp_path / "status.json").write_text("{}")
    done = command("report", tmp_path)
    told = "no metrics.jsonl yet: the run has logged nothing; status.py says where it stands"
    assert done.stderr == f"error: {tmp_path}: {told}\n"


def test_a_page_that_cannot_be_written_is_refused(command: Command, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"step": 1, "loss": 3.0})
    done = command("report", folder, "--output", tmp_path / "nowhere" / "page.html")
    assert done.returncode == 2
    assert "no folder" in done.stderr


def test_a_file_of_a_run_is_no_folder(command: Command, tmp_path: Path) -> None:
    file = write_run(tmp_path / "run", {"step": 1, "loss": 3.0}) / "metrics.jsonl"
    done = command("report", file)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {file}: is a file; give the folder of the run")


def test_a_page_beside_runs_is_none_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RUNS/* finds what the same command wrote before."""
    folders = [write_run(tmp_path / name, {"step": 1, "loss": 3.0}) for name in ("one", "two")]
    page = tmp_path / "comparison.html"
    for found in (folders, [page, *folders]):
        monkeypatch.setattr(sys, "argv", ["report.py", *map(str, found)])
        report.main()
        assert page.is_file()
    monkeypatch.setattr(sys, "argv", ["report.py", str(page)])
    with pytest.raises(ValueError, match=r"comparison\.html: is a page of this command; give the folders of runs"):
        report.main()


def test_a_page_of_a_run_in_a_closed_folder_goes_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", {"step": 1, "loss": 3.0})
    monkeypatch.setattr("os.access", lambda path, _: path != folder)
    monkeypatch.setattr(sys, "argv", ["report.py", str(folder)])
    with pytest.raises(ValueError, match="cannot be written to; name a file elsewhere by --output"):
        report.main()
    monkeypatch.setattr(sys, "argv", ["report.py", str(folder), "--output", str(tmp_path / "page.html")])
    report.main()


def test_a_page_replaces_only_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, output = write_run(tmp_path / "run", {"step": 1, "loss": 3.0}), tmp_path / "page.html"
    monkeypatch.setattr(sys, "argv", ["report.py", str(folder), "--output", str(output)])
    report.main()
    report.main()
    output.write_text("<!doctype html><html>the only copy</html>")
    with pytest.raises(
        ValueError, match=r"page\.html: exists and was not written by this command; nothing was replaced"
    ):
        report.main()
    assert "the only copy" in output.read_text()


@pytest.mark.parametrize(
    ("counted", "words"),
    [({"eval/x/examples": 100}, "25.0% [17.5%, 34.3%]<"), ({}, ">25.0%<")],
)
def test_exact_match_has_an_interval_where_examples_were_counted(
    tmp_path: Path, counted: dict[str, int], words: str
) -> None:
    folder = write_run(tmp_path, {"step": 1, "tokens": 8, "eval/x/loss": 0.5, "eval/x/exact_match": 0.25, **counted})
    assert words in page(read_history(folder), read_facts(folder), [])


@pytest.mark.parametrize("score", [*SCORES, OwnScore("steps", ", {:.1f} steps", is_of_answers=True)])
def test_a_tasks_own_score_is_in_percent_if_it_is_a_share(tmp_path: Path, score: OwnScore) -> None:
    history = read_history(write_run(tmp_path, {"step": 1, f"eval/x/{score.key}": 0.25}))
    assert scores(history) == {"x": {score.key: "25.0%" if score in SCORES else "0.2500"}}


def test_names_are_escaped_on_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<b>", {"step": 1, "loss": 3.0, "eval/<i>/loss": 3.0, "<u>": 1.0})
    text = page(read_history(folder), read_facts(folder), [Alert("trend", "<u>", 1, "<s>")])
    for name in ("b", "i", "u", "s"):
        assert f"<{name}>" not in text
        assert f"&lt;{name}&gt;" in text


def test_an_alert_is_one_line() -> None:
    alert = Alert("trend", "stream/kurt/03", 1200, "9 where its trend so far gives 4")
    assert str(alert) == "step 1200: trend of stream/kurt/03: 9 where its trend so far gives 4"
