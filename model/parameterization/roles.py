"""What each parameter is, by its name: the roles that the parameterization's table scales.

Never by shape: under ZeRO-3 shapes are empty until a parameter is gathered.
"""

import re
from typing import Literal

Role = Literal[
    "embedding",
    "projection",
    "hidden_matrix",
    "hidden_bias",
    "hidden_norm",
    "hidden_scalar",
    "qk_norm",
    "mixing",
    "final_norm",
    "final_scalar",
    "unembedding",
]

# Blocks of the model, and what objectives add of the kind
_LAYER = r"(model\.layers\.\d+|objective\.heads\.\d+|objective\.links\.\d+(\.block)?)\."
ROLES: tuple[tuple[str, Role], ...] = (
    (r"model\.embed_(tokens|positions)\.weight", "embedding"),
    (r"model\.(embed|output)_projection\.weight", "projection"),
    (_LAYER + r"((self_attn|mlp)\.)?\w+_proj\.weight", "hidden_matrix"),
    (_LAYER + r"(self_attn|mlp)\.\w+_proj\.bias", "hidden_bias"),
    # One number for each channel or head: its gradient shrinks with width
    (_LAYER + r"\w+_layernorm\.(weight|bias)", "hidden_norm"),
    (_LAYER + r"(attn|mlp)_residual\.gain", "hidden_norm"),
    (_LAYER + r"self_attn\.([qk]_whole_norm\.weight|sinks|shape_gains)", "hidden_norm"),
    # One number for all channels: its gradient sums over them
    (_LAYER + r"\w+_layernorm\.scale", "hidden_scalar"),
    (_LAYER + r"(attn|mlp)_residual\.scalar", "hidden_scalar"),
    (_LAYER + r"(self_attn\.(value_mix|keep_bias)|mlp\.(input_scale|activation\.alpha_[pn]))", "hidden_scalar"),
    (_LAYER + r"self_attn\.[qk]_norm\.weight", "qk_norm"),
    (_LAYER + r"self_attn\.mixing", "mixing"),
    (r"model\.norm\.(weight|bias)", "final_norm"),
    (r"model\.norm\.scale", "final_scalar"),
    (r"lm_head\.weight", "unembedding"),
    # Latent lookahead: slots start as embeddings do; the gain of states is one number behind the final norm
    (r"objective\.(thinker\.role|thinker\.waiting|register)", "embedding"),
    (r"objective\.thinker\.gain", "final_scalar"),
)

# Fan-in and fan-out of every projection, as fields of parameterization.Sizes
FANS: dict[str, tuple[str, str]] = {
    "q_proj": ("width", "query"),
    "k_proj": ("width", "key_value"),
    "v_proj": ("width", "key_value"),
    "g_proj": ("width", "query"),
    "ask_proj": ("width", "fixed"),
    "offer_proj": ("width", "fixed"),
    "o_proj": ("query", "width"),
    "gate_proj": ("width", "intermediate"),
    "up_proj": ("width", "intermediate"),
    "down_proj": ("intermediate", "width"),
}


def role_of(name: str) -> Role:
    """The role of a parameter, from its name; every name matches exactly one rule or is an error."""
    for pattern, role in ROLES:
        if re.fullmatch(pattern, name):
            return role
    raise ValueError(f"parameter {name!r} has no role: add its name to ROLES in model/parameterization/roles.py")


def fans_of(name: str) -> tuple[str, str]:
    """Fan-in and fan-out of a parameter or its module, as fields of parameterization.Sizes."""
    return FANS.get(name.split(".")[-2], ("width", "width"))
