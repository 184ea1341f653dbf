"""The report finds what is wrong with a run and nothing else, and reads any run folder or says why not."""

from __future__ import annotations

import base64
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from plumbline.launcher import report
from plumbline.launcher.runtime.report.alerts import Alert, find_alerts, loss_spikes, trend_alerts
from plumbline.launcher.runtime.report.facts import read_facts
from plumbline.launcher.runtime.report.history import Floats, Series, read_history
from plumbline.launcher.runtime.report.page import page, summary

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
    keys = {"stream/kurt/00": good, "stream/kurt/head": bad, "gemm_in/kurt_qkv/01": bad, "attn/max_logit/00": bad}
    records = [
        {"step": 10 * i, "tokens": 1000 * i, **{key: values[i - 1] for key, values in keys.items()}}
        for i in range(1, 41)
    ]
    alerts = find_alerts(read_history(write_run(tmp_path, *records)))
    assert {alert.key for alert in alerts} == {"stream/kurt/head", "gemm_in/kurt_qkv/01"}
    assert {alert.step for alert in alerts} == {260}


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


class Page(HTMLParser):
    """Collect the figures and headings of a page, and whatever it would have to load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[bytes] = []
        self.outside: list[str] = []
        self.feed(text)

    def handle_starttag(self, _tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href") and value is not None:
                found = re.fullmatch(r"data:image/png;base64,(.+)", value)
                if found:
                    self.images.append(base64.b64decode(found[1]))
                else:
                    self.outside.append(value)


@pytest.fixture(scope="module")
def run(run_pretrain: Pretrain, tiny_config: Path) -> Run:
    outcome = run_pretrain(tiny_config, "reported", ["metrics.diagnostics_interval=2"])
    assert outcome.code == 0, outcome.stderr
    return outcome.run


def test_a_real_run_becomes_one_page_that_needs_nothing_else(run: Run, command: Command, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    done = command("report", run.folder, "--output", output, "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
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
    text = output.read_text()
    shown = Page(text)
    assert len(shown.images) == 9
    assert all(image.startswith(PNG) for image in shown.images)
    assert not shown.outside
    for title in (
        "Loss",
        "Training",
        "Quantization",
        "Outliers",
        "Signal propagation",
        "Attention",
        "Gains",
        "Updates",
    ):
        assert f"<h2>{title}</h2>" in text


def test_a_run_without_diagnostics_that_goes_on_is_reported_as_far_as_it_is(
    run: Run, command: Command, tmp_path: Path
) -> None:
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in lines if '"loss"' in line][:7]
    (tmp_path / "metrics.jsonl").write_text("\n".join(steps) + '\n{"step": 8, "lo')
    done = command("report", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "0 alert(s)" in done.stdout
    text = (tmp_path / "report.html").read_text()
    assert len(Page(text).images) == 2
    assert "not complete" in text


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (None, "no metrics.jsonl"),
        ("", "holds no numbers yet"),
        ('{"step": 1, "tokens": 5, "loss": 3.0}\nnonsense\n{"step": 2, "tokens": 9, "loss": 3.0}\n', "line 2"),
        ('{"step": "one", "tokens": 5}\n{"step": 2, "tokens": 9, "loss": 3.0}\n', "step = 'one'"),
        ('[1, 2]\n{"step": 2, "tokens": 9, "loss": 3.0}\n', "a list"),
    ],
)
def test_what_is_not_a_run_is_refused(tmp_path: Path, lines: str | None, message: str) -> None:
    if lines is not None:
        (tmp_path / "metrics.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read_history(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_folder_that_is_no_run_is_one_error_and_no_page(command: Command, tmp_path: Path) -> None:
    done = command("report", tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path}: no metrics.jsonl there; give a run folder, such as runs/quickstart\n"
    assert not (tmp_path / "report.html").exists()


def test_a_page_that_cannot_be_written_is_refused(command: Command, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"step": 1, "loss": 3.0})
    done = command("report", folder, "--output", tmp_path / "nowhere" / "page.html")
    assert done.returncode == 2
    assert "no folder" in done.stderr


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
    [({"eval/x/examples": 100}, "x/exact_match 25.0% [17.5%, 34.3%]."), ({}, "x/exact_match 25.0%.")],
)
def test_exact_match_has_an_interval_where_examples_were_counted(
    tmp_path: Path, counted: dict[str, int], words: str
) -> None:
    folder = write_run(tmp_path, {"step": 1, "tokens": 8, "eval/x/loss": 0.5, "eval/x/exact_match": 0.25, **counted})
    assert words in page(read_history(folder), read_facts(folder), [])


def test_names_are_escaped_on_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<b>", {"step": 1, "loss": 3.0, "eval/<i>/loss": 3.0, "<u>": 1.0})
    text = page(read_history(folder), read_facts(folder), [Alert("trend", "<u>", 1, "<s>")])
    for name in ("b", "i", "u", "s"):
        assert f"<{name}>" not in text
        assert f"&lt;{name}&gt;" in text


def test_an_alert_is_one_line() -> None:
    alert = Alert("trend", "stream/kurt/03", 1200, "9 where its trend so far gives 4")
    assert str(alert) == "step 1200: trend of stream/kurt/03: 9 where its trend so far gives 4"
