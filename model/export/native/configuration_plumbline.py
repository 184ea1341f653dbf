"""Hold the configuration of a Plumbline decoder: the keys of its training configuration that shape its function."""

from typing import Any

from transformers import PreTrainedConfig
from transformers.utils.versions import require_version

# Older versions hand other arguments to the functions that make masks
require_version("transformers>=5.4", "This folder's model needs it: pip install -U transformers")


class PlumblineConfig(PreTrainedConfig):
    """Hold shapes under Llama's names, and the switches that `modeling_plumbline.py` describes."""

    model_type = "plumbline"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012 - Trainer adds a list to it

    def __init__(
        self,
        vocab_size: int = 256,
        hidden_size: int = 64,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 2,
        num_key_value_heads: int = 2,
        head_dim: int = 32,
        intermediate_size: int = 256,
        max_position_embeddings: int = 256,
        block: str = "pre_norm",
        norm: str = "rmsnorm",
        norm_eps: float = 1e-6,
        norm_bias: bool = False,
        final_norm: bool = True,
        skip_gain: float = 1.0,
        position_embedding: str = "rope",
        rope_theta: float = 10000.0,
        rope_frequencies: list[float] | None = None,
        rope_magnitude: float = 1.0,
        mlp: str = "swiglu",
        parallel: bool = False,
        attention: str = "softmax",
        shaped_gains: str = "fixed",
        qk_norm: str = "none",
        attn_logit_softcapping: float | None = None,
        attention_sink: bool = False,
        attention_gate: str = "none",
        value_residual: bool = False,
        attention_bias: bool = False,
        mlp_bias: bool = False,
        sliding_window: int | None = None,
        final_logit_softcapping: float | None = None,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.intermediate_size = intermediate_size
        self.max_position_embeddings = max_position_embeddings
        self.block = block
        self.norm = norm
        self.norm_eps = norm_eps
        self.norm_bias = norm_bias
        self.final_norm = final_norm
        self.skip_gain = skip_gain
        self.position_embedding = position_embedding
        self.rope_theta = rope_theta
        self.rope_frequencies = rope_frequencies  # if scaled, radians per token; None: those of rope_theta
        self.rope_magnitude = rope_magnitude  # of cosines and sines
        self.mlp = mlp
        self.parallel = parallel
        self.attention = attention
        self.shaped_gains = shaped_gains
        self.qk_norm = qk_norm
        self.attn_logit_softcapping = attn_logit_softcapping
        self.attention_sink = attention_sink
        self.attention_gate = attention_gate
        self.value_residual = value_residual
        self.attention_bias = attention_bias
        self.mlp_bias = mlp_bias
        self.sliding_window = sliding_window
        self.final_logit_softcapping = final_logit_softcapping
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
