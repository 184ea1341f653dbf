"""Define the interface of every kind of attention, so that no other code checks for kinds by name."""

# ruff: noqa: ARG002 - the signatures are those of the kinds

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from plumbline.model.attention.context import LayerCache
from plumbline.model.config import ModelConfig
from plumbline.model.kinds import Need, state_anew
from plumbline.model.parameterization.multipliers import Multipliers
from plumbline.model.parameterization.tensors import TensorRule


class Attention(nn.Module):
    """Map [B, T, hidden_size] -> [B, T, hidden_size] over positions; `forward(x, context, cache=None)`.

    Each kind is one file of this folder and one line of `ATTENTIONS`. Capability flags are false unless a kind sets
    them itself, even if it inherits from another kind. `needs` works the other way round: everything that it does not
    exclude must be supported. So each kind states its own, if only that it is empty.
    """

    tensors: tuple[TensorRule, ...]
    """Roles and first values of its tensors; a block may set others on its own attention."""
    needs: ClassVar[tuple[Need, ...]]
    """What it cannot be combined with, and why."""
    own_keys: ClassVar[tuple[str, ...]] = ()
    """Switches that no other kind reads, so that with any other they must have their default."""
    grafted: ClassVar[tuple[str, ...]] = ()
    """Name suffixes of tensors without which it is softmax attention: training may start from a model that lacks them
    (train.initialize_from)."""
    rounds_stored: ClassVar[bool] = False
    """Whether keys and values can be rounded as a cache would store them, through an attribute `as_stored`."""
    serves_slots: ClassVar[bool] = False
    """Whether slots of thoughts may attend through it: under any mask, to keys and values of another pass."""
    map_flops: ClassVar[int] = 12
    """Training FLOPs per query channel and token of the row: the products of queries with keys and of the map with
    values, each two forward and four backward."""
    varies_on_gpu: ClassVar[str | None] = None
    """Why repeating it on a GPU is not bitwise reproducible whatever the torch settings, or None if it is."""
    no_native_code: ClassVar[str | None] = "model/export/native/modeling_plumbline.py lacks it"
    """Why exports with our own code do not support it, or None if they do."""

    def __init__(self, config: ModelConfig, multipliers: Multipliers, layer: int) -> None:
        """Build the attention of one block.

        Args:
            config: the model's switches.
            multipliers: the parameterization's constants.
            layer: number of the block.
        """
        super().__init__()
        self.as_stored: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
        """Rounds keys and values as a cache would store them, if `rounds_stored`; set by quantization/precision.py."""

    def __init_subclass__(cls, **keys: Any) -> None:
        """Reset flags that would be inherited from another kind, since they only hold for what that kind computes.

        Raises:
            TypeError: the kind does not state its needs.
        """
        super().__init_subclass__(**keys)
        if "needs" not in cls.__dict__:
            raise TypeError(
                f"{cls.__name__} has no needs: state the switches that forward does not read, or needs = ()"
            )
        state_anew(cls, Attention, ("rounds_stored", "serves_slots", "no_native_code"))

    @classmethod
    def new_cache(cls, config: ModelConfig, batch: int, capacity: int, like: Tensor) -> Any:
        """Return an empty cache of one layer for up to `capacity` tokens, on the device and of the dtype of `like`.

        It has a `length`: the number of tokens seen.
        """
        return LayerCache(batch, capacity, config, like.device, like.dtype)

    @classmethod
    def gpu_compiler_refusal(cls, _config: ModelConfig) -> str | None:
        """Return why the installed torch cannot compile it for a GPU, or None if it can."""
        return None

    @classmethod
    def cautions(cls, _config: ModelConfig) -> list[str]:
        """Return warnings, a sentence each, about settings that are allowed but have been seen to fail."""
        return []

    @classmethod
    def has_unregulated_logits(cls, _config: ModelConfig) -> bool:
        """Return whether nothing but the block's norms limits the size of the attention logits."""
        return False

    @classmethod
    def scaled_module(cls, config: ModelConfig) -> str | None:
        """Return the module whose outputs absorb a factor on the attention logits, or None if there are no logits."""
        raise NotImplementedError(f"{cls.__name__}.scaled_module")

    def values(self, x: Tensor) -> Tensor:
        """Return values [B, num_key_value_heads, T, head_dim] of x [B, T, hidden_size], for model.value_residual."""
        raise NotImplementedError(f"{type(self).__name__}.values")
