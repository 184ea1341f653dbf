"""Define the shape of a decoder: Hugging Face names where they exist, one switch for each choice a block makes.

`family` names a whole set of switches at once (model/families.py); a switch given explicitly wins over its family.
Shapes that follow from others (`head_dim`, `intermediate_size`, ...) are filled in here, so a validated
`ModelConfig` never holds a "use the default" marker. Whether its block and its attention exist and fit together is for
`combinations.check_model` to say, which knows them: they are built from this configuration.
"""

from typing import Any, Literal

from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from plumbline.model.families import FAMILIES
from plumbline.model.kinds import kind_named
from plumbline.model.rotary_scaling import RopeScaling

GATED_MLPS = ("swiglu", "geglu")


class ModelConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Hold everything that determines the decoder's function, except the parameterization's multipliers."""

    family: str = "qwen3"
    """Named set of switches that the other keys start from: one of model/families.py."""
    vocab_size: int = Field(gt=0, le=2**31)
    """Rows of the embedding. Left out, a run takes the corpus's; a larger one pads it."""
    hidden_size: int = Field(gt=0, le=2**20)
    """Width of the residual stream."""
    num_hidden_layers: int = Field(gt=0, le=10_000)
    """Number of blocks, each an attention branch and an MLP branch."""
    num_attention_heads: int = Field(gt=0, le=2**20)
    """Query heads."""
    num_key_value_heads: int = Field(gt=0, le=2**20)
    """Key and value heads (grouped-query attention when fewer than the query heads). Default: as many."""
    head_dim: int = Field(gt=0, le=2**20)
    """Width of one head. Default: hidden_size / num_attention_heads. Keep it fixed when scaling width; add heads."""
    intermediate_size: int = Field(gt=0, le=2**24)
    """Inner width of the MLP. Default: 4 x hidden_size, or 8/3 x (rounded up to 64) when the MLP is gated."""
    max_position_embeddings: int = Field(gt=0, le=2**31)
    """Longest sequence, in tokens. Left out, a run takes data.sequence_length."""

    block: str = "pre_norm"
    """How norms, branches and the residual stream are wired: one of model/blocks/, a file each."""
    norm: Literal["rmsnorm", "layernorm", "single_scale_rmsnorm"]
    """Normalisation of the residual stream. single_scale_rmsnorm: one gain for all channels (arXiv 2506.19697)."""
    norm_eps: PositiveFloat
    """Added to the variance (or mean square) inside every norm."""
    norm_bias: bool
    """Additive bias in LayerNorm. RMSNorm has none."""
    final_norm: bool = True
    """Normalise before the head. Without it only the loss limits the size of the logits: set objective.z_loss."""
    skip_gain: PositiveFloat = 1.0
    """Multiplies the residual stream wherever a branch is added to it, at the base depth; the parameterization takes
    its m_L-th root, so that as much of the embedding is left at any depth."""
    branch_gain: Literal["fixed", "scalar", "vector"] = "fixed"
    """What multiplies a branch: a constant, or one learned number for the branch or for each channel (LayerScale)."""
    branch_gain_init: PositiveFloat = 1.0
    """First value of the branch gain at the base depth; the parameterization multiplies by m_L^-depth_alpha. In a block
    whose branches end in a norm it is that norm's first gain."""
    embedding_projection: bool = False
    """A square matrix after the embedding and another before the head, which take up outliers (arXiv 2506.19697)."""
    position_embedding: Literal["rope", "learned"]
    """Rotary embedding of queries and keys, or a learned table added to the token embedding."""
    rope_theta: PositiveFloat = 10000.0
    """Base wavelength of the rotary embedding."""
    rope_scaling: RopeScaling | None = Field(default=None, discriminator="rope_type")
    """How the rotary embedding is stretched beyond the length that a model was trained on: {rope_type: linear, factor},
    llama3 or yarn (model/rotary_scaling.py). None: not."""
    mlp: Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu", "relu2", "shaped_relu", "xielu"]
    """MLP kind: gated SiLU, gated GELU, exact GELU, tanh-approximated GELU (as GPT-2), ReLU, squared ReLU, leaky ReLU
    of slope 1 - width^-1/2 (arXiv 2306.17759), xIELU with two learned numbers (arXiv 2411.13010)."""
    mlp_input_scale: PositiveFloat | None = None
    """First value of a learned number that multiplies the MLP's inner activations before the nonlinearity. None: no
    such number."""
    parallel: bool = False
    """Attention and MLP read the same stream, and are added at once."""
    attention: str = "softmax"
    """The map over positions: one of model/attention/, a file each. softmax; shaped: identity + softmax - uniform
    (arXiv 2306.17759); mixing: a fixed random matrix over positions (arXiv 2506.01115); pruned: softmax over the tokens
    that a layer has not learned to drop (arXiv 2305.15805)."""
    pruning_rank: PositiveInt = 64
    """pruned: width of the vectors that vote on dropping."""
    shaped_gains: Literal["fixed", "learned"] = "fixed"
    """shaped: weights of the three parts, all 1, or learned for each head, the queries starting at zero (SAS)."""
    shaped_temperature: PositiveFloat | None = None
    """shaped: logits are divided by this times sqrt(hidden_size) as well, which keeps their noise per layer at
    O(1/width). None: not."""
    qk_norm: Literal["none", "head", "projection"]
    """RMSNorm of queries and keys before the rotary embedding: over each head, one gain vector for all heads (Qwen3),
    or over all heads at once (OLMo 2)."""
    qk_norm_frozen: bool = False
    """The gains of QK-norm stay at their first value."""
    qk_norm_init: PositiveFloat = 1.0
    """First value of the gains of QK-norm."""
    attn_logit_softcapping: PositiveFloat | None = None
    """Attention logits become cap * tanh(logits / cap). None: no cap. Needs [T, T] memory for each head."""
    attention_sink: bool = False
    """A learned logit for each head joins the softmax and attends to nothing (gpt-oss). Needs [T, T] memory."""
    attention_gate: Literal["none", "head", "elementwise"] = "none"
    """Sigmoid gate on the attention output before its projection (arXiv 2505.06708)."""
    value_residual: bool = False
    """Values are mixed with those of the first block, by two learned numbers for each block (arXiv 2410.17897)."""
    frozen_qk: bool = False
    """Query and key projections stay as they were drawn (arXiv 2506.01115)."""
    frozen_mlp: bool = False
    """The projections of the MLPs stay as they were drawn."""
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
        filled = {**kind_named(FAMILIES, "family", str(given.get("family", "qwen3"))), **given}
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
        if self.position_embedding != "rope" and self.rope_scaling is not None:
            raise ValueError("rope_scaling needs position_embedding: rope (it is learned)")
        if self.norm != "layernorm" and self.norm_bias:
            raise ValueError(f"norm_bias = true needs norm: layernorm ({self.norm} has no bias)")
        if self.qk_norm == "none" and (self.qk_norm_frozen or self.qk_norm_init != 1.0):
            raise ValueError("qk_norm_frozen and qk_norm_init need qk_norm: head or projection (it is none)")
        return self

    @property
    def is_gated(self) -> bool:
        """Return whether the MLP has a gate projection."""
        return self.mlp in GATED_MLPS
