"""Losses that do not compare are said to, where the best of them is named."""

from pathlib import Path

import pytest

from plumbline.launcher.runtime.sweep import comparison, grid, page
from plumbline.launcher.runtime.sweep.cautions import caution
from plumbline.launcher.runtime.sweep.result import Label, Result, RunOutcome
from plumbline.launcher.runtime.system.files import write_json_lines
from tests.launcher.runtime.sweep.conftest import make_result


def scored(
    tokenizer: str, task: str = "one", tokens: int = 256, length: int = 32, **corpora: tuple[float, float | None]
) -> Result:
    """Return a finished cell with nats per token and bits per byte of each corpus."""
    result: dict[str, float | None] = {}
    for name, (loss, bits) in corpora.items():
        result |= {f"eval/{name}/loss": loss, f"eval/{name}/bits_per_byte": bits, f"eval/{name}/tokens": tokens}
    loss = sum(nats for nats, _ in corpora.values()) / len(corpora)
    labels: dict[str, Label] = {"tokenizer": tokenizer, "task": task, "data.sequence_length": length}
    return make_result(labels, 1, RunOutcome("finished", loss=loss, result=result), signature=tokenizer)


BYTE, SAME = scored("byte", text=(3.0, 4.2)), scored("same", text=(2.9, 4.06))
BPE, OTHER = scored("bpe", text=(6.0, 3.3)), scored("other", text=(3.0, 4.2), code=(1.0, 1.4))
DIVERGED = make_result({"tokenizer": "x"}, 1, RunOutcome("diverged", result={"eval/text/loss": float("nan")}))
ANSWERS = [scored("a", "sums", sums=(0.1, None)), scored("b", "sums", sums=(0.2, None))]


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ([BYTE, SAME, DIVERGED], None),
        (ANSWERS, None),
        ([], None),
        ([BYTE, SAME, BPE], "caution: text: read by different tokenizers: nats per token do not compare"),
        ([BYTE, OTHER], "caution: the held-out corpora differ (text; code + text): nats per token do not compare"),
        ([BYTE, scored("a", tokens=512, text=(3.0, 4.2))], "caution: held-out text is read in windows of different"),
        ([BYTE, scored("a", length=64, text=(3.0, 4.2))], "caution: held-out text is read in windows of different"),
    ],
)
def test_a_caution_names_what_differs(results: list[Result], words: str | None) -> None:
    said = caution(results)
    assert (said is None) == (words is None)
    assert said is None or said.startswith(words or "")


def test_summaries_and_pages_say_it(tmp_path: Path) -> None:
    results = [BYTE, BPE]
    said = caution(results)
    assert said is not None
    assert list(grid.lines(grid.summarize(None, results)))[-1] == said
    assert grid.summarize(None, results).to_json()["caution"] == said
    settings = comparison.ComparisonConfig(variants="tokenizer")
    assert list(comparison.lines(comparison.summarize(settings, results)))[-1] == said
    write_json_lines(tmp_path / "results.jsonl", (result.to_json() for result in results))
    assert said in page.make(tmp_path)[0]


def test_tables_that_are_kept_apart_may_have_texts_of_their_own() -> None:
    settings = comparison.ComparisonConfig(variants="tokenizer", within="task")
    assert not comparison.summarize(settings, [BYTE, SAME, *ANSWERS]).cautions
    (of_one,) = comparison.summarize(settings, [BYTE, BPE, *ANSWERS]).cautions
    assert of_one == "one"
