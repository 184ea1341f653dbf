"""Define the shape of a decoder: Hugging Face names where they exist, one switch for each choice a block makes.

`family` names a whole set of switches at once (model/families.py); a switch given explicitly wins over its family.
Shapes that follow from others (`head_dim`, `intermediate_size`, ...) are filled in here, so a validated
`ModelConfig` never holds a "use the default" marker. `combinations.check_model` checks that its block and its attention
exist and fit together.
"""

from typing import Any, Literal, get_args

from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from plumbline.model.families import FAMILIES
from plumbline.model.kinds import kind_named
from plumbline.model.rotary_scaling import RopeScaling

GATED_MLPS = ("swiglu", "geglu")


def gated_width(hidden_size: int) -> int:
    """Return the inner width of a gated MLP that is left out: 8/3 of the stream's, rounded up to a multiple of 64."""
    return (8 * hidden_size // 3 + 63) // 64 * 64


def _nullable(model: type[BaseModel]) -> set[str]:
    """Return the keys to which None is a choice like any other; to the rest it is a key left out."""
    return {key for key, field in model.model_fields.items() if type(None) in get_args(field.annotation)}


class ModelConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Configure everything that determines the decoder's function, except the parameterization's multipliers."""

    family: str = "qwen3"
    """Named set of switches (docs/blocks.md). Keys given explicitly override the family's."""
    vocab_size: int = Field(gt=0, le=2**31, json_schema_extra={"left_out": "the first corpus's or task's"})
    """Rows of the embedding, one for each token id. A number larger than the corpus's pads it."""
    hidden_size: int = Field(gt=0, le=2**20)
    """Width of the residual stream, in channels."""
    num_hidden_layers: int = Field(gt=0, le=10_000)
    """Number of blocks, each an attention branch and an MLP branch."""
    num_attention_heads: int = Field(gt=0, le=2**20)
    """Query heads of each block."""
    num_key_value_heads: int = Field(gt=0, le=2**20, json_schema_extra={"left_out": "`num_attention_heads`"})
    """Key and value heads of each block. Fewer than the query heads make grouped-query attention."""
    head_dim: int = Field(gt=0, le=2**20, json_schema_extra={"left_out": "`hidden_size` / `num_attention_heads`"})
    """Width of one head, in channels. Keep it fixed when scaling width, and add heads."""
    intermediate_size: int = Field(
        gt=0, le=2**24, json_schema_extra={"left_out": "4 × `hidden_size`; of a gated MLP 8/3 ×, rounded up to 64"}
    )
    """Inner width of the MLP, in channels."""
    max_position_embeddings: int = Field(gt=0, le=2**31, json_schema_extra={"left_out": "`data.sequence_length`"})
    """Longest sequence that the model reads, in tokens."""

    block: str = "pre_norm"
    """How norms, branches and the residual stream are wired (docs/blocks.md)."""
    norm: Literal["rmsnorm", "layernorm", "single_scale_rmsnorm"]
    """Normalisation of the residual stream. single_scale_rmsnorm: one gain for all channels (arXiv 2506.19697)."""
    norm_eps: PositiveFloat
    """Added to the variance (or mean square) inside every norm."""
    norm_bias: bool
    """Whether LayerNorm has an additive bias. RMSNorm has none."""
    final_norm: bool = True
    """Normalise before the head. Without it only the loss limits the size of the logits: set objective.z_loss."""
    skip_gain: PositiveFloat = 1.0
    """Multiplies the residual stream wherever a branch is added to it, at the base depth; the parameterization takes
    its m_L-th root, so that the same share of the embedding is left at any depth."""
    branch_gain: Literal["fixed", "scalar", "vector"] = "fixed"
    """What multiplies a branch: a constant, or one learned number for the branch or for each channel (LayerScale)."""
    branch_gain_init: PositiveFloat = 1.0
    """First value of the branch gain at the base depth; the parameterization multiplies by m_L^-depth_alpha. In a block
    whose branches end in a norm it is that norm's first gain."""
    embedding_projection: bool = False
    """Add a square matrix after the embedding and another before the head, to absorb outliers (arXiv 2506.19697)."""
    position_embedding: Literal["rope", "learned"]
    """Rotary embedding of queries and keys, or a learned table added to the token embedding."""
    rope_theta: float = Field(default=10000.0, gt=1.0)
    """Base of the rotary embedding: its slowest channels turn once in about 2 pi times as many tokens."""
    rope_scaling: RopeScaling | None = Field(default=None, discriminator="rope_type")
    """How the rotary embedding is stretched beyond the length that a model was trained on: {rope_type: linear, factor},
    llama3 or yarn (model/rotary_scaling.py). None: not stretched."""
    mlp: Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu", "relu2", "shaped_relu", "xielu"]
    """MLP kind: gated SiLU, gated GELU, exact GELU, tanh-approximated GELU (as GPT-2), ReLU, squared ReLU, leaky ReLU
    of slope 1 - width^-1/2 (arXiv 2306.17759), xIELU with two learned numbers (arXiv 2411.13010)."""
    mlp_input_scale: PositiveFloat | None = None
    """First value of a learned factor on the MLP's inner activations before the nonlinearity. None: no such factor."""
    parallel: bool = False
    """Let attention and MLP read the same stream, and add both outputs at once."""
    attention: str = "softmax"
    """The map over positions. softmax: the usual one; shaped: identity + softmax - uniform
    (arXiv 2306.17759); mixing: a fixed random matrix over positions (arXiv 2506.01115); pruned: softmax over the tokens
    that a layer has not learned to drop (arXiv 2305.15805)."""
    pruning_rank: PositiveInt = 64
    """For `attention: pruned`: width in channels of the vectors that decide what to drop."""
    shaped_gains: Literal["fixed", "learned"] = "fixed"
    """For `attention: shaped`: weights of the three parts, all 1, or learned for each head, the queries starting at
    zero (SAS)."""
    shaped_temperature: PositiveFloat | None = None
    """For `attention: shaped`: logits are divided by this times sqrt(hidden_size) as well, which keeps their noise per
    layer at O(1/width). None: no such division."""
    qk_norm: Literal["none", "head", "projection"]
    """RMSNorm of queries and keys before the rotary embedding: over each head, one gain vector for all heads (Qwen3),
    or over all heads at once (OLMo 2)."""
    qk_norm_frozen: bool = False
    """Keep the gains of QK-norm at their first value."""
    qk_norm_init: PositiveFloat = 1.0
    """First value of the gains of QK-norm."""
    attn_logit_softcapping: PositiveFloat | None = None
    """Attention logits become cap * tanh(logits / cap). None: no cap. Needs [T, T] memory for each head."""
    attention_sink: bool = False
    """Add to each head's softmax a learned logit that attends to nothing (gpt-oss). Needs [T, T] memory."""
    attention_gate: Literal["none", "head", "elementwise"] = "none"
    """Sigmoid gate on the attention output before its projection (arXiv 2505.06708)."""
    value_residual: bool = False
    """Mix values with those of the first block, by two learned numbers for each block (arXiv 2410.17897)."""
    frozen_qk: bool = False
    """Keep query and key projections as they were drawn (arXiv 2506.01115)."""
    frozen_mlp: bool = False
    """Keep the projections of the MLPs as they were drawn."""
    attention_bias: bool
    """Whether the query, key, value and output projections have biases."""
    mlp_bias: bool
    """Whether the MLP projections have biases."""
    tie_word_embeddings: bool
    """Use the embedding matrix as the unembedding as well."""
    sliding_window: int | None = Field(default=None, ge=2)
    """Number of tokens that each token attends to: itself and those right before it; at least 2, since transformers
    keeps no cache for a window of 1. None: the whole prefix."""
    document_mask: bool = False
    """Attend only within a document and restart positions at each document of a packed sequence."""
    final_logit_softcapping: PositiveFloat | None = None
    """Logits become cap * tanh(logits / cap). None: no cap."""
    dropout: NonNegativeFloat = Field(default=0.0, lt=1.0)
    """Share of values that training drops from the embedding, the attention weights and the outputs of branches
    (attention without a skip is not a branch). Random mixing keeps its weights."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights at the base width; the parameterization scales it from there."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """Fill in missing keys from the family and the given shapes."""
        if not isinstance(values, dict):
            return values
        given = {key: value for key, value in values.items() if value is not None or key in _nullable(cls)}
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
            gated = filled.get("mlp") in GATED_MLPS
            filled.setdefault("intermediate_size", gated_width(width) if gated else 4 * width)
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
            raise ValueError("rope_scaling needs position_embedding: rope (it is learned): remove it")
        if self.position_embedding != "rope" and self.rope_theta != type(self).model_fields["rope_theta"].default:
            raise ValueError(
                f"rope_theta = {self.rope_theta:g} needs position_embedding: rope (it is learned): remove it"
            )
        if self.norm != "layernorm" and self.norm_bias:
            raise ValueError(f"norm_bias = true needs norm: layernorm ({self.norm} has no bias)")
        if self.qk_norm == "none" and (self.qk_norm_frozen or self.qk_norm_init != 1.0):
            raise ValueError("qk_norm_frozen and qk_norm_init need qk_norm: head or projection (it is none)")
        return self

    @property
    def is_gated(self) -> bool:
        """Return whether the MLP has a gate projection."""
        return self.mlp in GATED_MLPS
