"""Which switches of a ModelConfig exclude each other, and which combinations deserve a word of warning."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plumbline.model.config import ModelConfig

# A switch with a value -> what it asks of others, and why
NEEDS: tuple[tuple[str, Any, dict[str, tuple[Any, ...]], str], ...] = (
    ("attention", "shaped", {"attn_logit_softcapping": (None,), "attention_sink": (False,)}, "is another map"),
    ("attention", "shaped", {"document_mask": (False,), "sliding_window": (None,)}, "is centred over the whole prefix"),
    ("attention", "mixing", {"document_mask": (False,), "sliding_window": (None,)}, "mixes the whole prefix"),
    ("attention", "pruned", {"document_mask": (False,), "sliding_window": (None,)}, "has a mask of its own"),
    ("attention", "pruned", {"attn_logit_softcapping": (None,), "attention_sink": (False,)}, "needs the fused kernel"),
    ("attention", "pruned", {"attention_gate": ("none",), "value_residual": (False,)}, "has neither"),
    (
        "attention",
        "mixing",
        {
            "qk_norm": ("none",),
            "attn_logit_softcapping": (None,),
            "attention_sink": (False,),
            "attention_gate": ("none",),
            "value_residual": (False,),
            "frozen_qk": (False,),
        },
        "has neither queries nor keys",
    ),
    ("block", "skipless", {"attention": ("shaped",)}, "loses the tokens' identity without the shaped map's identity"),
    ("block", "skipless", {"attention_gate": ("none",), "value_residual": (False,)}, "has no values of its own"),
    ("parallel", True, {"block": ("pre_norm", "skipless")}, "is for blocks with one norm before both branches"),
    ("block", "post_norm", {"branch_gain": ("fixed",)}, "has the branch gain in its norm"),
    ("block", "sandwich_norm", {"branch_gain": ("fixed",)}, "has the branch gain in its norm"),
)


def check_combination(config: "ModelConfig") -> None:
    """Refuse switches that exclude each other.

    Raises:
        ValueError: naming the two keys, their values and what would fit.
    """
    for key, value, needs, why in NEEDS:
        if getattr(config, key) != value:
            continue
        for other, allowed in needs.items():
            found = getattr(config, other)
            if found not in allowed:
                fitting = " or ".join(str(each) for each in allowed)
                raise ValueError(f"{key} = {value} {why}: {other} = {found} does not fit, set it to {fitting}")
    if config.attention != "shaped" and (config.shaped_gains != "fixed" or config.shaped_temperature is not None):
        raise ValueError(f"shaped_gains and shaped_temperature need attention: shaped (it is {config.attention})")
    if config.qk_norm == "none" and (config.qk_norm_frozen or config.qk_norm_init != 1.0):
        raise ValueError("qk_norm_frozen and qk_norm_init need qk_norm: head or projection (it is none)")
    if config.block == "skipless":
        inner = config.num_attention_heads * config.head_dim
        if not config.num_attention_heads == config.num_key_value_heads or inner != config.hidden_size:
            raise ValueError(
                "block = skipless takes the stream itself as values: num_key_value_heads "
                f"({config.num_key_value_heads}) must equal num_attention_heads ({config.num_attention_heads}), and "
                f"num_attention_heads x head_dim ({inner}) must equal hidden_size ({config.hidden_size})"
            )


def cautions(config: "ModelConfig") -> list[str]:
    """What is allowed and has been seen to fail."""
    found = []
    unregulated = config.qk_norm == "none" and config.attn_logit_softcapping is None
    if config.block == "norm_free" and config.attention == "softmax" and unregulated:
        found.append(
            "model.block = norm_free without model.qk_norm or model.attn_logit_softcapping: attention logits are "
            "unregulated, and such training was seen to blow up (arXiv 2405.19279)"
        )
    return found
