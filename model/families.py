"""Define each `model.family` as a set of switches. Switches given explicitly override the family's."""

from typing import Any

# Pre-RMSNorm, per-head QK-norm, rotary positions, SwiGLU, no biases
QWEN3: dict[str, Any] = {
    "norm": "rmsnorm",
    "norm_eps": 1e-6,
    "norm_bias": False,
    "position_embedding": "rope",
    "mlp": "swiglu",
    "qk_norm": "head",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": QWEN3,
    "llama": {**QWEN3, "norm_eps": 1e-5, "qk_norm": "none"},
    "gpt2": {
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "norm_bias": True,
        "position_embedding": "learned",
        "mlp": "gelu_tanh",
        "qk_norm": "none",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    # Norms on branch outputs, none before them; QK-norm over the whole projection (arXiv 2501.00656)
    "olmo2": {**QWEN3, "block": "post_norm", "qk_norm": "projection"},
    # No norms outside QK-norm, small branches (arXiv 2405.19279); 0.2 is the authors' gain at 12 layers
    "outlier_protected": {
        **QWEN3,
        "block": "norm_free",
        "final_norm": False,
        "mlp": "gelu",
        "branch_gain_init": 0.2,
    },
    # Norms on branch outputs with small gains, frozen QK-norm (arXiv 2505.20524). The authors raise the softmax scale
    # to sqrt(2) of the usual one, which is a gain of 2^(1/4) on queries and on keys
    "fog": {
        **QWEN3,
        "block": "post_norm",
        "final_norm": False,
        "mlp": "gelu",
        "qk_norm_frozen": True,
        "qk_norm_init": 2**0.25,
        "branch_gain_init": 0.2,
    },
    # No skip around attention, no value and output projections (arXiv 2311.01906)
    "sas": {
        **QWEN3,
        "block": "skipless",
        "attention": "shaped",
        "shaped_gains": "learned",
        "mlp": "relu",
        "qk_norm": "none",
        "branch_gain": "scalar",
        "branch_gain_init": 0.1,
    },
    # Norm-free, stabilised only by the shape of attention and activation (arXiv 2306.17759)
    "shaped": {
        **QWEN3,
        "block": "norm_free",
        "attention": "shaped",
        "shaped_temperature": 1.0,
        "mlp": "shaped_relu",
        "qk_norm": "none",
        "skip_gain": 2**-0.5,
        "branch_gain_init": 2**-0.5,
    },
    # Attention that is fixed at initialisation and ignores the tokens (arXiv 2506.01115)
    "mixit": {**QWEN3, "attention": "mixing", "mlp": "shaped_relu", "qk_norm": "none"},
}
