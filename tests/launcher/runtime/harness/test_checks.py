"""What lm_eval would pass over in a task, or tell in words of its own, is refused when the task is looked up."""

import re
import socket
from pathlib import Path
from typing import Any

import pytest

from plumbline.launcher.runtime.harness.tasks import find_tasks
from tests.launcher.runtime.harness.test_tasks import CONTINUE, REPOSITORY, refuse, write_lines

CHOICES = (REPOSITORY / "configs" / "harness" / "choices.yaml").read_text(encoding="utf-8")
GOOD = {"question": "q", "choices": ["a", "b"], "answer": 1}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with a folder for tasks, and their data, and no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    (tmp_path / "corpora").mkdir()
    (tmp_path / "mine").mkdir()
    write_lines(tmp_path / "corpora" / "choices.jsonl", [GOOD])
    write_lines(tmp_path / "corpora" / "held_out.jsonl", [{"text": "x"}])
    return tmp_path


@pytest.mark.parametrize(
    ("rows", "yaml", "message"),
    [
        ([GOOD, GOOD | {"answer": 2}], ("", ""), r"document 1: the answer 2 is none of the 2 choices, in {'question'"),
        ([GOOD, GOOD | {"answer": -1}], ("", ""), "document 1: the answer -1 is none"),
        ([GOOD | {"answer": 2}, GOOD], ("", ""), "document 0: the answer 2 is none of the 2 choices, in {'question'"),
        ([GOOD | {"answer": "a"}, GOOD | {"answer": "A"}], ("", ""), "document 1: the answer 'A' is none"),
        ([GOOD | {"answer": [0, 1]}, GOOD | {"answer": [1, 2]}], ("", ""), "document 1: the answer 2 is none"),
        ([GOOD | {"choices": ["a", ""]}], ("", ""), "document 0: a choice is empty, in {'question'"),
        ([GOOD], ("test_split: test", "test_split: exam"), "test_split: exam is no split of its data, which has test$"),
        ([GOOD], ("fewshot_split: test", "fewshot_split: exam"), "fewshot_split: exam is no split"),
        ([GOOD], ("metric: acc,", "metric: akk,"), "lm_eval has no metric akk for output_type multiple_choice"),
        ([GOOD], ("metric: acc,", "metric: perplexity,"), "lm_eval has no metric perplexity for output_type multiple"),
    ],
)
def test_what_is_wrong_with_a_task_is_told(
    place: Path, rows: list[dict[str, Any]], yaml: tuple[str, str], message: str
) -> None:
    """Where lm_eval would score 0, leave the metric out, or have no word but that of a list or a string."""
    write_lines(place / "corpora" / "choices.jsonl", rows)
    (place / "mine" / "wrong.yaml").write_text(CHOICES.replace("task: choices", "task: wrong").replace(*yaml))
    with pytest.raises(ValueError, match=f"^--tasks wrong: (metric_list: )?{message}"):
        find_tasks(["wrong"], [place / "mine"])


def test_metrics_that_need_more_than_one_answer_are_known(place: Path) -> None:
    """And those of the other kinds of requests."""
    lasts = CONTINUE.replace("task: continue", "task: lasts").replace("generate_until", "loglikelihood")
    lasts = re.sub("generation_kwargs.*\n", "", lasts).replace('doc_to_target: ""', "doc_to_target: end")
    lasts = lasts.replace("metric: exact_match, aggregation: mean", "metric: perplexity, aggregation: perplexity")
    texts = {
        "mutual": CHOICES.replace("task: choices", "task: mutual").replace("metric: acc,", "metric: acc_mutual_info,"),
        "lasts": lasts,
    }
    for name, text in texts.items():
        (place / "mine" / f"{name}.yaml").write_text(text, encoding="utf-8")
    find_tasks(["mutual", "lasts"], [place / "mine"])
    (place / "mine" / "lasts.yaml").write_text(lasts.replace("metric: perplexity", "metric: acc_norm"))
    with pytest.raises(ValueError, match=r"^--tasks lasts: metric_list: lm_eval has no metric acc_norm"):
        find_tasks(["mutual", "lasts"], [place / "mine"])
