"""Define what every kind of attention states about itself, so that nobody else asks for it by name."""

# ruff: noqa: ARG002 - the signatures are those of the kinds

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from plumbline.model.attention.context import LayerCache
from plumbline.model.config import ModelConfig
from plumbline.model.kinds import Need, state_anew
from plumbline.model.parameterization.multipliers import Multipliers
from plumbline.model.parameterization.tensors import TensorRule


class Attention(nn.Module):
    """Map [B, T, hidden_size] -> [B, T, hidden_size] over positions; `forward(x, context, cache=None)`.

    Each kind is one file of this folder and one line of `ATTENTIONS`. Flags that say what it can do are false unless a
    kind sets them, also where it inherits from another. `needs` is the other way round: whatever is not refused there
    has to be computed.
    """

    tensors: ClassVar[tuple[TensorRule, ...]]
    """Roles and first values of its tensors."""
    needs: ClassVar[tuple[Need, ...]] = ()
    """What it cannot be combined with, and why."""
    own_keys: ClassVar[Mapping[str, Any]] = {}
    """Switches that no other kind reads -> the value that they have there."""
    grafted: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of tensors without which it is softmax attention: training may start from a model that has
    none of them (train.initialize_from)."""
    rounds_stored: ClassVar[bool] = False
    """Whether keys and values can be rounded as a cache would store them, through an attribute `as_stored`."""
    serves_slots: ClassVar[bool] = False
    """Whether slots of thoughts may attend through it: under any mask, to keys and values of another pass."""
    map_flops: ClassVar[int] = 12
    """Operations of training for each channel of a query and token of a row: of queries with keys and of the map with
    values, two forward and four backward each."""
    varies_on_gpu: ClassVar[str | None] = None
    """Why a GPU does not compute it to the last bit again when it is repeated, whatever torch is told; None: it can."""
    no_native_code: ClassVar[str | None] = "model/export/native/modeling_plumbline.py lacks it"
    """Why exports with our own code cannot hold it; None: they can."""

    def __init__(
        self,
        config: ModelConfig,
        multipliers: Multipliers,
        layer: int,
        values: bool = True,
        output: bool = True,
    ) -> None:
        """Build the attention of one block.

        Args:
            config: the model's switches.
            multipliers: the parameterization's constants.
            layer: number of the block.
            values: whether it projects the stream to values, or takes it as it is.
            output: whether it projects what it has mixed.
        """
        super().__init__()
        self.as_stored: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
        """What becomes of keys and values that are stored, where `rounds_stored`: quantization/precision.py sets it."""

    def __init_subclass__(cls, **keys: Any) -> None:
        """Take nothing over from another kind that is true of what that one computes alone."""
        super().__init_subclass__(**keys)
        state_anew(cls, Attention, ("rounds_stored", "serves_slots", "no_native_code"))

    @classmethod
    def new_cache(cls, config: ModelConfig, batch: int, capacity: int, like: Tensor) -> Any:
        """Return an empty cache of one layer for up to `capacity` tokens, on the device and of the dtype of `like`.

        It has a `length`, the tokens seen.
        """
        return LayerCache(batch, capacity, config, like.device, like.dtype)

    @classmethod
    def gpu_compiler_refusal(cls, _config: ModelConfig) -> str | None:
        """Say why the torch that is installed cannot compile it for a GPU; None: it can."""
        return None

    @classmethod
    def has_unregulated_logits(cls, _config: ModelConfig) -> bool:
        """Return whether nothing in the block holds the size of the attention logits but its norms."""
        return False

    @classmethod
    def scaled_module(cls, config: ModelConfig) -> str | None:
        """Return the module whose outputs a factor on the attention logits folds into; None: there are no logits."""
        raise NotImplementedError(f"{cls.__name__}.scaled_module")

    def values(self, x: Tensor) -> Tensor:
        """Return values of x [B, T, hidden_size], [B, num_key_value_heads, T, head_dim], for model.value_residual."""
        raise NotImplementedError(f"{type(self).__name__}.values")
