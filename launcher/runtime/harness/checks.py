"""Say what is wrong with a task of lm_eval: with one that cannot be loaded, or would be scored without a word.

lm_eval gives a question whose label is no choice the score 0, and leaves out a metric that it does not know.
"""

import traceback
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any

LONGEST = 200
"""Characters of a document to show."""


class TaskError(ValueError):
    """State what is wrong with a task, and what to change."""


def check(task: Any) -> None:
    """Check the labels of all documents of a task, and that each of its metrics is computed.

    Raises:
        TaskError: names the first wrong label, with its document, or the metrics that are missing.
    """
    from lm_eval.api.task import ConfigurableTask

    if not isinstance(task, ConfigurableTask) or task.config.process_results is not None:
        return  # what a task computes itself needs no labels among the choices
    if task.OUTPUT_TYPE == "multiple_choice":
        for number, doc in enumerate(task.task_docs):
            if problem := _wrong_label(task, doc):
                raise TaskError(f"--tasks {task.task_name}: document {number}: {problem}")
    missing = [name for name, function in task._metric_fn_list.items() if function is None]
    if not missing and task.OUTPUT_TYPE != "generate_until":  # whose metrics may return several, of other names
        missing = [name for name in task._metric_fn_list if name not in _computed(task)]
    if missing:
        raise TaskError(
            f"--tasks {task.task_name}: metric_list: lm_eval has no metric {', '.join(missing)} for output_type "
            f"{task.OUTPUT_TYPE}; correct the name, or leave it out"
        )


def cause_in_task(error: BaseException) -> str | None:
    """Return what is wrong with the task whose construction raised an error, or None if that is not known."""
    from lm_eval.api.task import ConfigurableTask

    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    owners = [frame.f_locals.get("self") for frame in reversed(frames)]
    task = next((owner for owner in owners if isinstance(owner, ConfigurableTask)), None)
    with suppress(Exception):  # as far as it was made: anything may be missing
        return next(_problems(task), None)
    return None


def _problems(task: Any) -> Iterator[str]:
    splits = {key: getattr(task.config, key) for key in ("training_split", "validation_split", "test_split")}
    for key, split in (splits | {"fewshot_split": task.fewshot_cfg.split}).items():
        if split is not None and split not in task.dataset:
            there = ", ".join(task.dataset)
            yield f"--tasks {task.config.task}: {key}: {split} is no split of its data, which has {there}"
    doc = task.task_docs[0]
    if not all(task.doc_to_choice(doc)):
        yield f"--tasks {task.config.task}: document 0: a choice is empty, in {_shown(doc)}; leave such documents out"
    if problem := _wrong_label(task, doc):
        yield f"--tasks {task.config.task}: document 0: {problem}"


def _wrong_label(task: Any, doc: Any) -> str | None:
    """Return what is wrong with the label of a question, or with one of several, or None."""
    choices = task.doc_to_choice(doc)
    label = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    for each in label if isinstance(label, list) else [label]:
        if each not in (choices if isinstance(each, str) else range(len(choices))):
            return (
                f"the answer {each!r} is none of the {len(choices)} choices, in {_shown(doc)}; doc_to_target gives the "
                "text of a choice, or its number, counted from 0"
            )
    return None


def _computed(task: Any) -> Collection[str]:
    """Return the metrics that lm_eval computes of a document, from an answer that is made up."""
    doc = task.task_docs[0]
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        answers: list[Any] = [-1.0]
    elif task.OUTPUT_TYPE == "loglikelihood":
        answers = [(-1.0, False)]
    else:  # acc_mutual_info asks for each choice once more, without the question
        times = 2 if "acc_mutual_info" in task._metric_fn_list else 1
        answers = [(-1.0, False)] * len(task.doc_to_choice(doc)) * times
    computed: dict[str, Any] = task.process_results(doc, answers)
    return computed


def _shown(doc: Any) -> str:
    return str(doc)[:LONGEST]
