"""Make the report itself: what the page and the JSON document say."""

import base64
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

import numpy as np

from plumbline.launcher.runtime.report import figures
from plumbline.launcher.runtime.report.alerts import Alert
from plumbline.launcher.runtime.report.history import History, Series
from plumbline.launcher.runtime.run.scores import wilson_interval

STYLE = """
body { font: 15px/1.45 sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse } td, th { padding: .15rem .8rem .15rem 0; text-align: left }
img { max-width: 100% } .alert { color: #a00 } .quiet { color: #666 }
"""
START = '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="generator" content="Plumbline">'
ALERTS_SHOWN = 50


@dataclass(frozen=True)
class Section:
    """Hold a figure with what it shows."""

    title: str
    text: str
    image: bytes


def summary(history: History, alerts: list[Alert]) -> dict[str, Any]:
    """Return the report for programs; numbers that are not finite become None, since JSON has none."""
    last = {key: _number(series.values[-1]) for key, series in sorted(history.series.items()) if not _by_place(key)}
    return {
        "run": str(history.folder),
        "complete": history.complete,
        "step": int(max(series.steps[-1] for series in history.series.values())),
        "tokens": int(max(series.tokens[-1] for series in history.series.values())),
        "last": last,
        "by_place": _by_places(history),
        "alerts": [asdict(alert) for alert in alerts],
    }


def page(history: History, alerts: list[Alert], examples: Section | None = None) -> str:
    """Return the report for people, an HTML document that needs nothing else; `examples` come after the numbers."""
    facts = summary(history, alerts)
    rows = [("state", "complete" if history.complete else "not complete")]
    rows += [(name, f"{facts[name]:,}") for name in ("step", "tokens")]
    rows += [(key, "not finite" if value is None else f"{value:.6g}") for key, value in facts["last"].items()]
    table = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
    body = "".join(
        f"<h2>{escape(section.title)}</h2><p>{escape(section.text)}</p>"
        f'<img alt="{escape(section.title)}" src="data:image/png;base64,{base64.b64encode(section.image).decode()}">'
        for section in (*sections(history), *([] if examples is None else [examples]))
    )
    name = escape(history.folder.name)
    return (
        f"{START}<title>{name}</title><style>{STYLE}</style></head>"
        f"<body><h1>{name}</h1><h2>Alerts</h2>{_alert_list(alerts)}<h2>Last values</h2><table>{table}</table>"
        f"{body}</body></html>\n"
    )


def sections(history: History) -> Iterator[Section]:
    """Yield a section for everything that the run has numbers for."""
    series = history.series
    held_out = {key: series[key] for key in sorted(series) if key.startswith("eval/") and key.endswith("loss")}
    losses = {**({"training": series["loss"]} if "loss" in series else {}), **held_out}
    if losses:
        yield Section("Loss", "Nats per token, over training tokens.", figures.curves({"loss": losses}))
    single: dict[str, dict[str, Series]] = {
        key: {key: series[key]} for key in ("lr", "grad_norm", "tokens_per_second", "mfu") if key in series
    }
    if single:
        text = "Learning rate at the base, gradient norm before clipping, speed."
        yield Section("Training", text, figures.curves(single, log=frozenset({"grad_norm"})))
    ahead = {key: series[key] for key in sorted(series) if re.fullmatch(r"\w+/loss(_\d+)?", key)}  # objectives' reports
    gain = {key: series[key] for key in ("lookahead/gain",) if key in series}
    if ahead:
        text = (
            "What predicts further than the next token, by distance; gain: how much better than the plain prediction."
        )
        panels = {"nats per target": ahead, "gain, nats": gain}
        yield Section("Objective", text, figures.curves({title: panel for title, panel in panels.items() if panel}))
    exact = {key: series[key] for key in sorted(series) if key.endswith("exact_match")}
    if exact:
        text = (
            "Share of held-out examples whose every answer token is the likeliest; thinking: with thoughts. Last, with "
            f"Wilson's 95 % interval: {'; '.join(_with_interval(series, key) for key in exact)}."
        )
        yield Section("Exact match", text, figures.curves({"exact match": exact}))
    deltas = {key: series[key] for key in sorted(series) if key.endswith("/w8a8_delta")}
    if deltas:
        text = "What rounding weights and inputs of the blocks' matrices to int8 adds to the held-out loss, in nats."
        yield Section("Quantization", text, figures.curves({"w8a8_delta": deltas}))
    for title, text, draw, quantities, log in _DEPTH:
        known = {key: name for key, name in quantities.items() if history.layers(key)}
        if known:
            yield Section(title, text, draw(history, known, log))
    for title, text, kind in (
        (
            "Gains",
            "Mean, least and largest entry of every learned gain; those of QK-norm that explode break FP8.",
            "gain",
        ),
        ("Updates", "RMS of one update of each matrix over the RMS of the matrix.", "update"),
    ):
        quantities = {key: key.removeprefix(f"{kind}/") for key in history.quantities(kind)}
        if quantities:
            yield Section(title, text, figures.by_layer(history, quantities))


def _with_interval(series: Mapping[str, Series], key: str) -> str:
    """Return the last exact match of a source with its 95 % interval, as text."""
    share, counted = series[key].values[-1], f"{key.rpartition('/')[0]}/examples"
    last = f"{key.removeprefix('eval/')} {share:.1%}"
    if counted not in series:  # an older run
        return last
    examples = series[counted].values[-1]
    low, high = wilson_interval(share * examples, examples)
    return f"{last} [{low:.1%}, {high:.1%}]"


_KURTOSIS = {
    "stream/kurt": "stream: kurtosis of neuron RMS",
    "gemm_in/kurt_qkv": "input of the qkv projections: kurtosis",
    "gemm_in/kurt_mlp2": "input of down_proj: kurtosis",
    "stream/mmr": "stream: max-median ratio",
}
_TOKENS = {
    "stream/corr_mean": "token correlation, mean",
    "stream/corr_rms": "token correlation, RMS",
    "stream/rank1_resid": "what is left without the mean token",
    "stream/stable_rank": "stable rank",
}
_ATTENTION = {
    "attn/entropy": "entropy / log(keys)",
    "attn/entropy_min": "the same, lowest head",
    "attn/sink": "weight on token 0",
    "attn/max_logit": "largest logit",
}
_SHARES = {
    "branch/ratio_attn": "attention's share of the stream",
    "branch/ratio_mlp": "the MLP's share",
    "stream/rms": "RMS of the stream",
    "grad/ratio_q_v": "gradient of W_Q / W_V",
}
_DEPTH = (
    ("Outliers", "High in some blocks: a few channels carry the stream, and low precision will cost.",
     figures.maps, _KURTOSIS, frozenset(_KURTOSIS)),
    ("Signal propagation", "Correlation near 1, or a residue near 0, is rank collapse: all tokens look alike.",
     figures.maps, _TOKENS, frozenset({"stream/stable_rank"})),
    ("Attention", "Entropy near 0: it has collapsed on single tokens; near 1: it looks at nothing in particular.",
     figures.maps, _ATTENTION, frozenset[str]()),
    ("Branches and gradients", "What each branch adds to the stream, and whether queries still learn.",
     figures.by_layer, _SHARES, frozenset({"stream/rms"})),
)  # fmt: skip


def _alert_list(alerts: list[Alert]) -> str:
    if not alerts:
        return '<p class="quiet">None: all numbers are finite, no loss spikes, no kurtosis off its trend.</p>'
    items = [f'<li class="alert">{escape(str(alert))}</li>' for alert in alerts[:ALERTS_SHOWN]]
    more = f"<p>and {len(alerts) - ALERTS_SHOWN} more: see --json</p>" if len(alerts) > ALERTS_SHOWN else ""
    return f"<ul>{''.join(items)}</ul>{more}"


def _by_places(history: History) -> dict[str, dict[str, Any]]:
    """Return quantity -> the last step that it was observed at, and its value there by place, in the order of depth."""
    places = {}
    for quantity in sorted({key.rpartition("/")[0] for key in history.series if _by_place(key)}):
        layers = history.layers(quantity)
        step = max(series.steps[-1] for series in layers.values())
        # A place without a number at that step must not be shown with an older one
        values = {
            place: _number(series.values[-1]) if series.steps[-1] == step else None for place, series in layers.items()
        }
        places[quantity] = {"step": int(step), "last": values}
    return places


def _by_place(key: str) -> bool:
    return key.count("/") == 2 and not key.startswith("eval/")


def _number(value: np.float64) -> float | None:
    return float(value) if math.isfinite(value) else None
