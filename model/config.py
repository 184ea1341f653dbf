"""The shape of a decoder: Hugging Face names where they exist, one switch for each choice a block makes.

`family` names a whole set of switches at once (`FAMILIES` below); a switch given explicitly wins over its family.
Shapes that follow from others (`head_dim`, `intermediate_size`, ...) are filled in here, so a validated
`ModelConfig` never holds a "use the default" marker.
"""

from typing import Any, Literal

from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

# What each family means. Qwen3 is the default: pre-RMSNorm, per-head QK-norm, rotary positions, SwiGLU, no biases.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "norm": "rmsnorm",
        "norm_eps": 1e-6,
        "norm_bias": False,
        "position_embedding": "rope",
        "mlp": "swiglu",
        "qk_norm": True,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    },
    "llama": {
        "norm": "rmsnorm",
        "norm_eps": 1e-5,
        "norm_bias": False,
        "position_embedding": "rope",
        "mlp": "swiglu",
        "qk_norm": False,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    },
    "gpt2": {
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "norm_bias": True,
        "position_embedding": "learned",
        "mlp": "gelu_tanh",
        "qk_norm": False,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
}

GATED_MLPS = ("swiglu", "geglu")


class ModelConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Everything that determines the function computed by the decoder, except the parameterization's multipliers."""

    family: Literal["qwen3", "llama", "gpt2"] = "qwen3"
    """Named set of switches that the other keys start from."""
    vocab_size: PositiveInt
    """Rows of the embedding. Left out, a run takes the corpus's; a larger one pads it."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    num_hidden_layers: PositiveInt
    """Number of blocks, each an attention branch and an MLP branch."""
    num_attention_heads: PositiveInt
    """Query heads."""
    num_key_value_heads: PositiveInt
    """Key and value heads (grouped-query attention when fewer than the query heads). Default: as many."""
    head_dim: PositiveInt
    """Width of one head. Default: hidden_size / num_attention_heads. Keep it fixed when scaling width; add heads."""
    intermediate_size: PositiveInt
    """Inner width of the MLP. Default: 4 x hidden_size, or 8/3 x (rounded up to 64) when the MLP is gated."""
    max_position_embeddings: PositiveInt
    """Longest sequence, in tokens. Left out, a run takes data.sequence_length."""

    block: Literal["pre_norm"] = "pre_norm"
    """Block family: how norms, branches and the residual stream are wired."""
    norm: Literal["rmsnorm", "layernorm"]
    """Normalisation before each branch and before the head."""
    norm_eps: PositiveFloat
    """Added to the variance (or mean square) inside every norm."""
    norm_bias: bool
    """Additive bias in LayerNorm. RMSNorm has none."""
    position_embedding: Literal["rope", "learned"]
    """Rotary embedding of queries and keys, or a learned table added to the token embedding."""
    rope_theta: PositiveFloat = 10000.0
    """Base wavelength of the rotary embedding."""
    mlp: Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu2"]
    """MLP kind: gated SiLU, gated GELU, exact GELU, tanh-approximated GELU (as GPT-2), squared ReLU."""
    qk_norm: bool
    """RMSNorm with a learned gain on every query and key head, before the rotary embedding (as Qwen3)."""
    attention_bias: bool
    """Biases in the query, key, value and output projections."""
    mlp_bias: bool
    """Biases in the MLP projections."""
    tie_word_embeddings: bool
    """Use the embedding matrix as the unembedding."""
    sliding_window: PositiveInt | None = None
    """Each token attends to itself and the window - 1 tokens before it. None: to the whole prefix."""
    document_mask: bool = False
    """Attend only within a document and restart positions at each document of a packed sequence."""
    final_logit_softcapping: PositiveFloat | None = None
    """Logits become cap * tanh(logits / cap). None: no cap."""
    dropout: NonNegativeFloat = Field(default=0.0, lt=1.0)
    """Dropout on the embedding, the attention weights and both branch outputs, while training."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights at the base width; the parameterization scales it from there."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """Complete what the user left out, from the family and from the shapes that were given."""
        if not isinstance(values, dict):
            return values
        given = {key: value for key, value in values.items() if value is not None}
        filled = {**FAMILIES.get(given.get("family", "qwen3"), {}), **given}
        heads, width = filled.get("num_attention_heads"), filled.get("hidden_size")
        if isinstance(heads, int) and isinstance(width, int) and heads > 0:
            filled.setdefault("num_key_value_heads", heads)
            if "head_dim" not in filled:
                if width % heads:
                    raise ValueError(
                        f"hidden_size = {width} does not divide by num_attention_heads = {heads}: "
                        "change one of them, or set head_dim"
                    )
                filled["head_dim"] = width // heads
            gated_width = (8 * width // 3 + 63) // 64 * 64
            filled.setdefault("intermediate_size", gated_width if filled.get("mlp") in GATED_MLPS else 4 * width)
        return filled

    @model_validator(mode="after")
    def _check_shapes(self) -> "ModelConfig":
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads = {self.num_attention_heads} does not divide by "
                f"num_key_value_heads = {self.num_key_value_heads}: each key/value head serves equally many queries"
            )
        if self.position_embedding == "rope" and self.head_dim % 2:
            raise ValueError(
                f"head_dim = {self.head_dim} is odd: rotary embedding rotates pairs, choose an even head_dim"
            )
        if self.norm == "rmsnorm" and self.norm_bias:
            raise ValueError("norm_bias = true needs norm: layernorm (RMSNorm has no bias)")
        return self

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate projection."""
        return self.mlp in GATED_MLPS
