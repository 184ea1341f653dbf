"""Find tasks of lm-evaluation-harness by name, score a loaded model on them, and print the scores.

lm_eval is an optional dependency, imported only when tasks are requested.
"""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plumbline.launcher.runtime.harness.checks import TaskError, cause_in_task, check
from plumbline.launcher.runtime.models.open import LoadedModel

KEPT = ("results", "groups", "group_subtasks", "versions", "n-shot", "n-samples", "higher_is_better")
"""Parts of lm_eval's document to keep; the rest describes the machine or repeats the tasks' files."""


@dataclass(frozen=True)
class Tasks:
    """Hold tasks and groups of tasks with their data."""

    manager: Any
    """lm_eval's index that contains the tasks."""
    loaded: list[Any]


def find_tasks(names: Sequence[str], folders: Sequence[Path]) -> Tasks:
    """Look tasks up and read their data.

    Args:
        names: names of tasks, groups or tags.
        folders: folders with YAML files of tasks, which override lm_eval's own of the same name.

    Raises:
        ValueError: lm_eval is not installed, a folder or task is missing, a task's data cannot be read, or a label or
            metric of it is none.
    """
    _require_lm_eval()
    absent = [str(folder) for folder in folders if not folder.is_dir()]
    if absent:
        raise ValueError(f"--task-folder {', '.join(absent)}: no such folder")
    manager = _index(names, folders)
    unknown = [name for name in names if name not in manager.task_index]
    if unknown:
        raise ValueError(_unknown(unknown[0], manager.all_tasks, folders))
    return Tasks(manager, [item for name in names for item in _load(name, manager)])


def score_tasks(
    model: LoadedModel,
    tokenizer: Any,
    tasks: Tasks,
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    bootstrap: int = 0,
) -> dict[str, Any]:
    """Run tasks.

    Args:
        model: any loaded model.
        tokenizer: its own.
        tasks: see `find_tasks`.
        num_fewshot: examples before each question; None uses the task's own number. A task that specifies 0 keeps it,
            and one that scores whole texts has none.
        limit: use only the first `limit` documents of each task; None uses all.
        batch_size: sequences in one forward pass.
        bootstrap: resamples for standard errors of metrics that are not means; 0 disables all standard errors.

    Returns:
        lm_eval's version and the `KEPT` parts of its document, ready for JSON.

    Raises:
        ValueError: a task requests something that the model cannot do, or a metric overflows.
    """
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.utils import handle_non_serializable

    from plumbline.launcher.runtime.harness.adapter import HarnessModel

    try:
        document = simple_evaluate(
            model=HarnessModel(model, tokenizer, batch_size),
            tasks=tasks.loaded,
            task_manager=tasks.manager,
            num_fewshot=num_fewshot,
            limit=limit,
            bootstrap_iters=bootstrap,
            log_samples=False,
        )
    except OverflowError as error:
        raise ValueError(
            f"--tasks: a metric is too large to be a number ({error}): text without spaces is one word, whose "
            "perplexity overflows; leave word_perplexity out of the task's metric_list"
        ) from error
    kept = {key: document[key] for key in KEPT if key in document}
    plain = json.dumps(kept, default=handle_non_serializable)
    return {"lm_eval": document["lm_eval_version"], **json.loads(plain)}


def lines(scores: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each task and metric of `score_tasks`: value, any standard error, documents, shots."""
    for task, values in scores["results"].items():
        shots = f", {scores['n-shot'][task]}-shot" if task in scores["n-shot"] else ""
        for key, value in values.items():
            metric, comma, kind = key.partition(",")  # "acc,none": the metric, and how answers were filtered
            if not comma or metric.endswith("_stderr"):
                continue
            name = metric if kind == "none" else f"{metric} ({kind})"
            error = values[f"{metric}_stderr,{kind}"]
            spread = f" ± {error:.4f}" if isinstance(error, float) else ""
            yield f"{task:<20} {name:<20} {value:.4f}{spread:<10}  n {values['sample_len']}{shots}"


def _require_lm_eval() -> None:
    """Raise ValueError if lm_eval is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(f"--tasks needs lm-evaluation-harness ({error}): pip install -e '.[tasks]'") from error


def _index(names: Sequence[str], folders: Sequence[Path]) -> Any:
    """Return lm_eval's index, of only the folders if they have all tasks, since its own 14,000 take ten seconds."""
    from lm_eval.tasks import TaskManager

    if folders:
        local = TaskManager(include_path=list(folders), include_defaults=False)
        if set(names) <= set(local.all_subtasks):
            return local
    return TaskManager(include_path=list(folders))


def _load(name: str, manager: Any) -> list[Any]:
    """Load the group or the tasks of a name, and check them.

    Raises:
        ValueError: they cannot be loaded, or something is wrong with one.
    """
    try:
        loaded = manager.load([name])
        for task in loaded["tasks"].values():
            check(task)
    except TaskError:
        raise
    except ConnectionError as error:
        raise ValueError(
            f"--tasks {name}: its data is on the Hugging Face hub, which cannot be reached ({_first_line(error)}); run "
            "it once with a network and the same HF_HOME, which fills the datasets cache, or give the task local "
            "data_files (docs/harness.md)"
        ) from error
    except Exception as error:  # a task is third-party YAML, possibly with Python: anything can be wrong with it
        causes = [error] if error.__cause__ is None else [error, error.__cause__]
        if known := cause_in_task(causes[-1]):
            raise TaskError(known) from error
        what = ": ".join(f"{type(cause).__name__}: {_first_line(cause)}" for cause in causes)
        raise ValueError(
            f"--tasks {name}: lm_eval cannot load it: {what}; look into its YAML (data_files are relative to the "
            "working directory)"
        ) from error
    for task in loaded["tasks"].values():
        if task.OUTPUT_TYPE == "loglikelihood_rolling":
            task.set_config(key="num_fewshot", value=0)  # before a text that is scored whole there is nothing to show
    groups = loaded.get("groups", {})
    return [groups[name]] if name in groups else list(loaded["tasks"].values())


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")


def _unknown(name: str, known: Sequence[str], folders: Sequence[Path]) -> str:
    """Return an error for an unknown task, with similar names and how to write one."""
    near = ", ".join(difflib.get_close_matches(name, known, n=5)) or "none"
    places = " and ".join(["lm_eval's own tasks", *map(str, folders)])
    return (
        f"--tasks {name}: not among {places}; near names: {near}. A task of your own is a file NAME.yaml with "
        f"`task: {name}` under a --task-folder; a file that is no YAML is passed over (docs/harness.md)"
    )
