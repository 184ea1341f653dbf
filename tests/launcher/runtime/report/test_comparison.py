"""Several runs on one page: each at its place to the right, and what they differ in."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from plumbline.launcher.runtime.report.comparison import cautions, differences, distinct_names, make, read_runs
from plumbline.launcher.runtime.report.history import Series, over_places
from plumbline.launcher.runtime.report.overlay import Overlay, apart_from
from plumbline.model.flops import training_flops_per_token
from tests.launcher.runtime.report.pages import Page

if TYPE_CHECKING:
    from collections.abc import Iterator

    from plumbline.launcher.runtime.report.html import Figure
    from plumbline.launcher.runtime.report.overlay import OfRuns
    from tests.conftest import Command, Pretrain, Run


@pytest.fixture(scope="module")
def run(run_pretrain: Pretrain, tiny_config: Path) -> Run:
    outcome = run_pretrain(tiny_config, "first", ["metrics.diagnostics_interval=5"])
    assert outcome.code == 0, outcome.stderr
    return outcome.run


@pytest.fixture(scope="module")
def other(run_pretrain: Pretrain, tiny_config: Path) -> Run:
    outcome = run_pretrain(tiny_config, "second", ["metrics.diagnostics_interval=5", "optimizer.lr=0.001"])
    assert outcome.code == 0, outcome.stderr
    return outcome.run


def test_several_runs_become_one_page_beside_the_first(run: Run, other: Run, command: Command) -> None:
    beside = run.folder.parent / "comparison.html"
    done = command("report", run.folder, other.folder, "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["report"] == str(beside)
    assert facts["differences"] == {"optimizer.lr": [0.004, 0.001]}
    assert [each["last"]["loss"] for each in facts["runs"]] == [each.column("loss")[20] for each in (run, other)]
    shown = Page(beside.read_text())
    assert not shown.outside
    assert shown.titles[:3] == ["Runs", "Differences", "Loss and rate"]
    assert shown.titles[-1] == "Alerts"
    assert {"Held-out loss: email", "Held-out loss over first: email", "Kurtosis of the stream"} <= set(shown.figures)
    assert command("report", run.folder, other.folder, "--by", "time").returncode == 0, "its own page is replaced"
    beside.write_text("my notes")
    refused = command("report", run.folder, other.folder)
    assert refused.returncode == 2
    assert beside.read_text() == "my notes"


def test_numbers_that_do_not_compare_are_named(run: Run, other: Run, tmp_path: Path) -> None:
    shutil.copytree(other.folder, tmp_path / "copy")
    file = tmp_path / "copy" / "config.yaml"
    text = file.read_text()

    def told() -> list[str]:
        return cautions(read_runs([run.folder, tmp_path / "copy"]))

    assert told() == []
    file.write_text(text.replace("sequence_length: 32", "sequence_length: 64"))
    (windows,) = told()
    assert "windows of different length (data.sequence_length = 32, 64)" in windows
    file.write_text(text.replace("document_mask: false", "document_mask: true"))
    (masks,) = told()
    assert "others not (model.document_mask): their held-out losses do not compare" in masks
    file.write_text(text.replace("micro_batch_size: 2", "micro_batch_size: 4"))
    (amounts,) = told()
    assert "different amounts of held-out text" in amounts
    file.write_text(text)
    metrics = tmp_path / "copy" / "metrics.jsonl"
    numbers = metrics.read_text()
    metrics.write_text(numbers.replace('"eval/email/bits_per_byte": ', '"eval/email/bits_per_byte": 1'))
    (texts,) = told()
    assert texts.startswith("Under the name email the runs score different held-out text")
    metrics.write_text(re.sub(r'(eval/email/(bits_per_byte|loss)": )[^,}]+', r"\g<1>0.0", numbers))
    assert told() == [], "a loss of 0 says nothing of the text"
    metrics.write_text(numbers)
    file.write_text(text.replace("micro_batch_size: 2", "micro_batch_size: 4"))
    (tmp_path / "copy" / "tokenizer" / "tokenizer.json").write_text("{}")
    assert len(told()) == 2
    assert "by different tokenizers" in told()[0]
    assert "by different tokenizers" in make([run.folder, tmp_path / "copy"], "tokens")[0]


def test_numbers_stand_where_their_run_was(run: Run, other: Run) -> None:
    first, _ = runs = read_runs([run.folder, other.folder])
    tokens = first.history.series["loss"].tokens
    assert first.place(tokens, "tokens").tolist() == tokens.tolist() == [256.0 * step for step in range(1, 21)]
    config = first.known.config
    assert config is not None
    of_token = training_flops_per_token(config.model, config.data.sequence_length, config.objective)
    assert first.place(tokens, "flops") == pytest.approx(tokens * of_token)
    speed = run.column("tokens_per_second")
    passed = np.cumsum([256 / speed[step] for step in range(1, 21)])
    assert first.place(tokens, "time") == pytest.approx(passed)
    assert first.place(tokens[:1] / 2, "time") == pytest.approx(passed[:1] / 2)
    scale = Overlay(runs, "flops").scale
    assert scale.unit <= of_token * 20 * 256 < 1000 * scale.unit
    assert f"10^{round(np.log10(scale.unit))}" in scale.label


def test_a_branch_begins_with_no_time(tmp_path: Path) -> None:
    lines = ({"step": step, "tokens": 100 * step, "loss": 1.0, "tokens_per_second": 50.0} for step in (11, 12, 13))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (branch,) = read_runs([tmp_path])
    assert branch.place(np.array([1000.0, 1100.0, 1300.0]), "time").tolist() == [0, 2, 6]


def test_a_run_that_diverged_does_not_press_the_others_flat(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, float] = {}
    draw = Overlay.figure

    def figure(overlay: Overlay, title: str, text: str, series: OfRuns, *rest: Any, **options: Any) -> Iterator[Figure]:
        drawn[title] = max((float(own.values[own.values > 0].max(initial=0)) for own in series.values()), default=0.0)
        return draw(overlay, title, text, series, *rest, **options)

    def diverged_after(step: int, until: float = math.inf) -> Path:
        broken = tmp_path / (f"rough_{until}" if until < math.inf else f"broken_{step}")
        shutil.copytree(run.folder, broken, ignore=shutil.ignore_patterns("checkpoints", "logs"))
        records = [json.loads(line) for line in (broken / "metrics.jsonl").read_text().splitlines()]
        for record in records:
            record |= {key: 1e6 for key in record if key.endswith("loss") and step < record["step"] <= until}
        (broken / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return broken

    monkeypatch.setattr(Overlay, "figure", figure)
    early, late = diverged_after(0), diverged_after(10)
    overlay = Overlay(read_runs([run.folder, early, late]), "tokens")
    vocabulary = overlay.runs[0].known.vocab_size
    assert vocabulary is not None
    text = next(overlay.groups()).figures[0].text
    assert f"Above {overlay.most:.4g} nothing is drawn of the runs that diverged: broken_0, broken_10." in text
    assert drawn["Training loss"] < overlay.most == pytest.approx(np.log(vocabulary) + 1)
    assert max(drawn["Training loss, second half"], drawn["Held-out loss: email"]) < overlay.most
    assert "nothing is drawn" not in next(Overlay(read_runs([early]), "tokens").groups()).figures[0].text
    assert drawn["Training loss"] == 1e6, "where there is nothing else to draw"
    titles = [
        figure.title for figure in next(Overlay(read_runs([early, diverged_after(5)]), "tokens").groups()).figures
    ]
    assert "Training loss" in titles
    assert "Training loss, second half" not in titles, "there is nothing to draw"
    rough = diverged_after(0, until=10)
    begun = diverged_after(0, until=11)
    (begun / "result.json").unlink()
    (begun / "metrics.jsonl").write_text("".join((begun / "metrics.jsonl").read_text().splitlines(keepends=True)[:2]))
    assert "nothing is drawn" not in next(Overlay(read_runs([run.folder, begun]), "tokens").groups()).figures[0].text
    assert "nothing is drawn" not in next(Overlay(read_runs([run.folder, rough]), "tokens").groups()).figures[0].text
    assert drawn["Training loss"] > overlay.most, "how a run began that did not diverge"


def test_what_a_run_lacks_is_named(run: Run, tmp_path: Path, command: Command) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text('{"step": 1, "tokens": 256, "loss": 3.0}\n')
    for by, words in (("flops", "no config.yaml that can be read"), ("time", "has no tokens_per_second")):
        done = command("report", run.folder, bare, "--by", by, "--output", tmp_path / "page.html")
        assert done.returncode == 2
        assert str(bare) in done.stderr
        assert words in done.stderr
    shown = Page(make([run.folder, bare], "tokens")[0])
    assert "Training loss" in shown.figures


def test_what_differs_is_found_in_lists_and_in_the_code(run: Run, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run.folder, copy, ignore=shutil.ignore_patterns("checkpoints", "logs"))
    assert differences(read_runs([run.folder, copy])) == {}
    config = (copy / "config.yaml").read_text()
    changed = config.replace("weight: 1.0", "weight: 2.0").replace("hidden_size: 64", "hidden_size: 32\n  new_key: 1")
    (copy / "config.yaml").write_text(changed)
    environment = json.loads((copy / "environment.json").read_text())
    environment["packages"]["torch"] = "1.0"
    (copy / "environment.json").write_text(json.dumps({**environment, "host": "elsewhere"}))
    found = differences(read_runs([run.folder, copy]))
    assert found["model.hidden_size"] == [64, 32]
    assert found["model.new_key"] == [None, 1]
    assert found["data.train.0.weight"] == [1.0, 2.0]
    assert found["environment.packages.torch"][1] == "1.0"
    assert not any("host" in key for key in found)


def test_names_are_as_short_as_they_can_be(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "x", tmp_path / "b" / "x", tmp_path / "b" / "y"]
    assert distinct_names(paths[1:]) == ["x", "y"]
    assert distinct_names(paths) == ["a/x", "b/x", "b/y"]
    with pytest.raises(ValueError, match="given twice"):
        distinct_names([paths[0], tmp_path / "b" / ".." / "a" / "x"])


def of(values: dict[int, float]) -> Series:
    steps = np.array(list(values), dtype=np.float64)
    return Series(steps, 10 * steps, np.array(list(values.values())))


def test_a_difference_is_taken_where_both_are_known() -> None:
    apart = apart_from(of({1: 9.0, 2: 4.0, 3: 2.0, 5: 0.0}), of({2: 3.0, 4: 1.0}))
    assert apart.steps.tolist() == [2, 3]
    assert apart.values.tolist() == [1.0, 0.0]


def test_of_all_blocks_those_count_that_are_numbers() -> None:
    layers = {"00": of({1: 1.0, 2: np.nan, 3: 5.0}), "01": of({1: 3.0, 2: 4.0})}
    assert over_places(layers, "mean").values.tolist() == [2, 4, 5]
    assert over_places(layers, "min").values.tolist() == [1, 4, 5]
    assert over_places(layers, "max").values.tolist() == [3, 4, 5]


def test_by_is_for_several_runs(run: Run, command: Command) -> None:
    done = command("report", run.folder, "--by", "time")
    assert done.returncode == 2
    assert "--by is for several runs" in done.stderr
