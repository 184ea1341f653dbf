"""List the kinds of attention, each a map over positions in its own file; kind.py defines their interface."""

from plumbline.model.attention.kind import Attention
from plumbline.model.attention.mixing import MixingAttention
from plumbline.model.attention.pruned import PrunedAttention
from plumbline.model.attention.shaped import ShapedAttention
from plumbline.model.attention.softmax import SoftmaxAttention
from plumbline.model.config import ModelConfig
from plumbline.model.kinds import kind_named

ATTENTIONS: dict[str, type[Attention]] = {
    "softmax": SoftmaxAttention,
    "shaped": ShapedAttention,
    "mixing": MixingAttention,
    "pruned": PrunedAttention,
}


def attention_kind(config: ModelConfig) -> type[Attention]:
    """Return the attention class that model.attention names.

    Raises:
        ValueError: there is none of that name.
    """
    return kind_named(ATTENTIONS, "attention", config.attention)
