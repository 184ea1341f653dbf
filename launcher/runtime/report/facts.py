"""Read the facts of a run from its folder, and describe them: size, data, machine, command, time, scores, samples."""

import math
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from plumbline.data.config import SourceConfig
from plumbline.data.damage import read_object
from plumbline.data.tasks.candidates import SCORES
from plumbline.launcher.runtime.commands.cli import duration
from plumbline.launcher.runtime.config.budget import totals
from plumbline.launcher.runtime.config.identity import changes, makes_other_steps
from plumbline.launcher.runtime.config.load import config_in
from plumbline.launcher.runtime.config.plan import RunPlan, plan_run
from plumbline.launcher.runtime.config.remarks import describe_settings
from plumbline.launcher.runtime.config.run_files import CONFIG
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.report.history import History
from plumbline.launcher.runtime.report.standing import Standing, look
from plumbline.launcher.runtime.run.ledger import goodput, total
from plumbline.launcher.runtime.run.starts import read_starts
from plumbline.launcher.runtime.scoring.scores import wilson_interval
from plumbline.launcher.runtime.system.log import LOG
from plumbline.model.flops import training_flops_per_token
from plumbline.model.parameterization.sizes import sizes

SHARES = ("accuracy", *(score.key for score in SCORES if score.is_share))
"""Ends of the names of scores that are shown in percent, besides exact match."""
LONGEST_CHANGE = 200
"""Most characters shown of a changed key: sources of data have many."""


@dataclass(frozen=True)
class Facts:
    """Hold the facts of a run; None for those missing in its folder."""

    config: Config | None
    plan: RunPlan | None
    environment: dict[str, Any] | None
    samples: str
    standing: Standing
    changed: tuple[str, ...] = ()
    """What later starts changed of what decides the steps, in words; the configuration is that of the last start."""

    @property
    def parameters(self) -> int | None:
        """Return the number of parameters."""
        return None if self.plan is None else totals(self.plan.rows).total

    @property
    def vocab_size(self) -> int | None:
        """Return the size of the model's vocabulary."""
        return None if self.config is None else self.config.model.vocab_size

    @property
    def flops_per_token(self) -> float | None:
        """Return the training FLOPs per token of text, as MFU counts them."""
        config = self.config
        if config is None:
            return None
        return training_flops_per_token(config.model, config.data.sequence_length, config.objective)

    @property
    def seconds(self) -> float | None:
        """Return the time that the run has taken, over all starts."""
        return sum(total(self.standing.attempts).values()) if self.standing.attempts else None


def read_facts(folder: Path) -> Facts:
    """Read the existing files of a run. A configuration that cannot be read, such as an older one, causes a warning.

    Raises:
        ValueError: environment.json is damaged.
    """
    config = plan = None
    if (folder / CONFIG).is_file():
        try:
            config = config_in(folder)
            plan = plan_run(config)
        except (ValueError, OSError) as error:
            config = None
            LOG.warning(f"size, data and settings are not shown: {error}")
    environment, samples = folder / "environment.json", folder / "samples.txt"
    return Facts(
        config,
        plan,
        read_object(environment) if environment.is_file() else None,
        samples.read_text(encoding="utf-8", errors="replace") if samples.is_file() else "",
        look(folder, ()),
        tuple(_changed(folder)),
    )


def _changed(folder: Path) -> Iterator[str]:
    """Yield what each start of a run changed of what decides its steps; a list that is damaged causes a warning."""
    try:
        starts = [(start.step, start.config) for start in read_starts(folder) if start.config is not None]
    except (ValueError, OSError) as error:
        LOG.warning(f"what later starts changed is not shown: {error}")
        return
    for (_, before), (step, after) in pairwise(starts):
        found = changes(before, after).items()
        texts = [f"{path} {was} -> {becomes}" for path, (was, becomes) in found if makes_other_steps(path)]
        if texts:
            yield f"after step {step}: {', '.join(textwrap.shorten(text, LONGEST_CHANGE) for text in texts)}"


def state(history: History, known: Facts) -> str:
    """Return the state of a run in a few words."""
    standing = known.standing
    if history.complete:
        return "complete"
    return "not complete" if standing.state in ("unknown", "complete") else f"{standing.state}, not complete"


def describe(history: History, known: Facts) -> Iterator[tuple[str, str]]:
    """Yield the facts of a run as (name, text), in reading order."""
    why = known.standing.why
    yield "folder", str(history.folder)
    yield "state", state(history, known) + (f": {why}" if why and known.standing.state != "complete" else "")
    if known.config is not None and known.plan is not None:
        yield from _settings(known.config, known.plan)
        if known.changed:
            yield "changed", "; ".join(known.changed)
    if known.environment is not None:
        yield from _machine(known.environment)
    yield from _progress(history, known)


def _settings(config: Config, plan: RunPlan) -> Iterator[tuple[str, str]]:
    model, data, rule = config.model, config.data, config.parameterization
    count, size = totals(plan.rows), sizes(model, rule)
    yield "size", f"{count.total:,} parameters, {count.non_embedding:,} without embedding and head"
    yield (
        "model",
        f"{model.family}: width {model.hidden_size}, {model.num_hidden_layers} blocks, {model.num_attention_heads} "
        f"heads of {model.head_dim}, {model.num_key_value_heads} of keys and values, MLP {model.intermediate_size}, "
        f"vocabulary {model.vocab_size:,}",
    )
    base = f", {size.width:g} x the base's width, {size.depth:g} x its depth" if rule.base_hidden_size else ""
    yield "parameterization", f"{rule.rule}{base}"
    if not config.objective.is_plain:
        yield "objective", str(config.objective)
    yield "data", _sources(data.train)
    yield (
        "batch",
        f"{data.global_batch_size} sequences of {data.sequence_length:,} tokens = "
        f"{plan.batch_plan.tokens_per_step:,} tokens a step",
    )
    yield "optimizer", f"{config.optimizer.name}, {describe_settings(config, plan)}"
    yield "schedule", plan.schedule.describe()
    rounding = "" if config.precision.is_plain else f", {config.precision}"
    yield "precision", f"{config.deepspeed.precision}{rounding}, ZeRO-{config.deepspeed.zero_stage}"


def _sources(sources: Sequence[SourceConfig]) -> str:
    """Name sources, with the shares of the samples that they begin with if there are several."""
    whole = sum(source.weight for source in sources) or 1.0
    shares = ["" if len(sources) == 1 else f" {source.weight / whole:.0%}" for source in sources]
    names = [f"task {source.task.name}" if source.task else ", ".join(source.paths) for source in sources]
    text = "; ".join(f"{name}{share}" for name, share in zip(names, shares, strict=True))
    changes = any(source.weight_changes or source.max_epochs is not None for source in sources)
    return f"{text} at first (show.py RUN counts the samples of each)" if changes and len(sources) > 1 else text


def _machine(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    gpus, packages, command = (environment.get(key) for key in ("gpus", "packages", "command"))
    gpus = list(map(str, gpus)) if isinstance(gpus, list) else []
    packages = packages if isinstance(packages, dict) else {}
    kinds = ", ".join(f"{gpus.count(kind)} x {kind}" for kind in dict.fromkeys(gpus))
    cores = f"{environment.get('cpus')} CPU cores"
    job = environment.get("slurm_job_id")
    where = f"{environment.get('host')}{f', Slurm job {job}' if job else ''}"  # of rank 0
    yield "machine", f"{environment.get('world_size')} rank(s); {where}: {kinds or cores}"
    versions = [f"{name} {packages[name]}" for name in ("torch", "deepspeed") if packages.get(name)]
    commit = environment.get("git_commit")
    changed = ", with changes" if environment.get("git_dirty") else ""
    yield "software", ", ".join([*versions, *([f"commit {str(commit)[:10]}{changed}"] if commit else [])])
    yield "command", shlex.join(map(str, command if isinstance(command, list) else []))


def _progress(history: History, known: Facts) -> Iterator[tuple[str, str]]:
    if known.seconds is not None:
        attempts = known.standing.attempts
        share = goodput(total(attempts)) or 0.0
        yield "duration", f"{duration(known.seconds)} in {len(attempts)} start(s), {share:.0%} of it steps that count"
    elif history.has_speed:
        seconds = float(history.seconds(history.series["tokens_per_second"].tokens[-1:])[0])
        yield "duration", f"{duration(seconds)}, steps alone"
    whole = "" if known.plan is None else f" of {known.plan.total_steps:,}"
    ratio = "" if known.parameters is None else f", {history.tokens / known.parameters:.3g} for each parameter"
    yield "steps", f"{history.step:,}{whole}"
    yield "tokens", f"{history.tokens:,}{ratio}"
    if known.flops_per_token is not None:
        yield "compute", f"{history.tokens * known.flops_per_token:.3g} FLOPs"


def scores(history: History) -> dict[str, dict[str, str]]:
    """Return held-out source -> score -> its last value as text, with Wilson's 95 % interval for shares of examples."""
    found: dict[str, dict[str, str]] = {}
    for key, value in _last_scores(history).items():
        source, _, score = key.removeprefix("eval/").rpartition("/")
        found.setdefault(source, {})[score] = _score_text(history, key, value)
    return found


def _score_text(history: History, key: str, value: float) -> str:
    """Return a held-out score as text."""
    if key.endswith("exact_match"):
        examples = _last_scores(history).get(f"{key.rpartition('/')[0]}/examples")
        if not examples or not math.isfinite(value):  # older runs did not count them
            return f"{value:.1%}"
        low, high = wilson_interval(value * examples, examples)
        return f"{value:.1%} [{low:.1%}, {high:.1%}]"
    if key.endswith(SHARES):
        return f"{value:.1%}"
    return f"{value:,.0f}" if key.endswith(("tokens", "examples")) else f"{value:.4f}"


def _last_scores(history: History) -> dict[str, float]:
    """Return the scores of result.json or, before it exists, of the last evaluation."""
    so_far = {key: float(series.values[-1]) for key, series in history.series.items()}
    found = so_far if history.result is None else history.result
    return {key: value for key, value in found.items() if key.startswith("eval/") and key.count("/") >= 2}
