"""Make the stock class of transformers that has the shape of one of our models."""

from transformers import Qwen3Config, Qwen3ForCausalLM

from plumbline.model.config import ModelConfig


def stock_model(model: ModelConfig) -> Qwen3ForCausalLM:
    """Return the stock class of our default family, of a shape."""
    shared = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size "
        "max_position_embeddings tie_word_embeddings"
    )
    return Qwen3ForCausalLM(Qwen3Config(**{name: getattr(model, name) for name in shared.split()}))
