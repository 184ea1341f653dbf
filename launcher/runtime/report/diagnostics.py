"""Group the numbers of a run in reading order, and explain each of them."""

from dataclasses import dataclass
from typing import Literal

from plumbline.launcher.runtime.report.history import Over


@dataclass(frozen=True)
class Panel:
    """Describe the figure of one number."""

    quantity: str
    """Its key in metrics.jsonl, without the place."""
    title: str
    text: str
    """What it means, in one line."""
    log: bool = False
    """Draw it on a logarithmic scale."""
    style: Literal["lines", "map"] = "lines"
    """For a number of each block: a line per block, or a map of depth against training."""
    over: Over = "mean"
    """How the blocks are reduced to one number when runs are compared."""


@dataclass(frozen=True)
class PanelGroup:
    """Describe figures that belong together."""

    title: str
    text: str
    panels: tuple[Panel, ...]


def _map(quantity: str, title: str, text: str, over: Over = "max", log: bool = False) -> Panel:
    return Panel(quantity, title, text, log, "map", over)


OUTLIERS = "Outliers"
TRAINING = (
    Panel("lr", "Learning rate", "At the base size; the table of the parameterization multiplies it for each tensor."),
    Panel("grad_norm", "Gradient norm", "Of all gradients, before clipping.", log=True),
)
GROUPS = (
    PanelGroup(
        "Signal propagation",
        "What of the input is left in the residual stream, block by block.",
        (
            _map("stream/corr_mean", "Token correlation", "Mean over pairs; near 1 all tokens look alike."),
            _map("stream/corr_rms", "Token correlation, RMS", "The same where signs would cancel."),
            _map(
                "stream/rank1_resid", "Beyond the mean token", "What is left without it; near 0: rank collapse.", "min"
            ),
            _map(
                "stream/stable_rank", "Stable rank", "Directions that carry the stream; 1: a single one.", "min", True
            ),
            Panel(
                "stream/rms", "Size of the stream", "RMS; it should neither vanish nor explode with depth.", log=True
            ),
            Panel("emb/rms", "Size of the embedding", "RMS of its output, before its multiplier."),
        ),
    ),
    PanelGroup(
        "Attention",
        "Where queries look.",
        (
            _map("attn/entropy", "Entropy", "Share of that of equal weights; 0: one token, 1: all alike.", "mean"),
            _map("attn/entropy_min", "Entropy of the lowest head", "Falls to 0 where a head has collapsed.", "min"),
            _map("attn/sink", "Weight on the first token", "Mean over heads.", "mean"),
            _map("attn/sink_max", "Weight on the first token, highest head", "Of the head that looks there most."),
            _map("attn/max_logit", "Largest logit of attention", "What the softmax is given at most."),
        ),
    ),
    PanelGroup(
        "Branches and gradients",
        "What each block does, and whether it still learns.",
        (
            Panel(
                "branch/ratio_attn", "Attention's share", "RMS that it adds over that of the stream before.", log=True
            ),
            Panel("branch/ratio_mlp", "The MLP's share", "The same of the MLP; near 0 a block is idle.", log=True),
            Panel("grad/ratio_q_v", "Gradient of queries", "Norm over that of values; 0: they do not learn.", log=True),
            Panel("grad/ratio_k_v", "Gradient of keys", "The same of keys.", log=True),
        ),
    ),
    PanelGroup(
        OUTLIERS,
        "High in some blocks: few channels carry the stream, and low precision will cost.",
        (
            _map("stream/kurt", "Kurtosis of the stream", "Of channels over all tokens; 1: none stands out.", log=True),
            _map("stream/mmr", "Max-median ratio", "Largest channel of a token over its median one.", log=True),
            _map("gemm_in/kurt_qkv", "Kurtosis into q_proj", "Of a token's channels, and into k and v.", log=True),
            _map("attn_in/kurt_q", "Kurtosis of the queries", "Of a token's channels, into attention.", log=True),
            _map("attn_in/kurt_k", "Kurtosis of the keys", "The same of keys.", log=True),
            _map("attn_in/kurt_v", "Kurtosis of the values", "The same of values.", log=True),
            _map("gemm_in/kurt_mlp2", "Kurtosis into down_proj", "Of a token's channels, in the MLP.", log=True),
            _map("gemm_in/kurt_block", "Kurtosis out of the block", "Of a token's channels, in the stream.", log=True),
        ),
    ),
    PanelGroup(
        "Logits",
        "What leaves the head.",
        (
            Panel(
                "logits/z", "Mean squared logsumexp", "Drifts where nothing holds the logits; z-loss does.", log=True
            ),
            Panel("logits/max", "Largest logit", "Of all tokens of the observation."),
            Panel("head/rms", "Size of the logits", "RMS of all of them."),
        ),
    ),
    PanelGroup(
        "Speed",
        "Over all ranks.",
        (
            Panel("tokens_per_second", "Tokens per second", "Falls where a rank, the disk or a link is slow."),
            Panel("mfu", "Model FLOPs utilisation", "Of the peak of all devices."),
            Panel("data_wait", "Waiting for data", "Seconds since the line before; near 0 the loader keeps up."),
            Panel("step_time", "Time of a step", "Seconds, without evaluations and saves."),
            Panel(
                "checkpoint_stall", "Waiting for checkpoints", "Seconds since the line before; what is behind is free."
            ),
            Panel("rank_skew", "Slowest rank", "Its time for a fixed product over the median of the others."),
        ),
    ),
)
