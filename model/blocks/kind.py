"""Define the interface of every block, so that no other code checks for blocks by name."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from plumbline.model.attention.kind import Attention
from plumbline.model.config import ModelConfig
from plumbline.model.kinds import Need, state_anew
from plumbline.model.mlp import MLP
from plumbline.model.parameterization.multipliers import Multipliers
from plumbline.model.parameterization.tensors import TensorRule, norm_rules

NO_SHARED_NORM = Need({"parallel": (False,)}, "has no norm that both branches could read")
GAIN_IN_NORM = Need({"branch_gain": ("fixed",)}, "has the branch gain in its norm")


class Block(nn.Module):
    """Run one block, [B, T, hidden_size] -> [B, T, hidden_size]; `forward(x, context, cache=None)`.

    Each kind is one file of this folder and one line of `BLOCKS`.
    """

    tensors: ClassVar[tuple[TensorRule, ...]] = norm_rules(r"\w+_layernorm")
    """Roles and first values of its own tensors; branches and residuals define theirs."""
    needs: ClassVar[tuple[Need, ...]] = ()
    """What it cannot be combined with, and why."""
    branch_ends: ClassVar[Mapping[str, str]] = MappingProxyType({"attn": "self_attn.o_proj", "mlp": "mlp.down_proj"})
    """Branch added to the stream by `{branch}_residual` -> its last module, into whose outputs its factors fold."""
    ends_in_norm: ClassVar[Collection[str]] = ()
    """Branches of which that module is a norm, whose gains are the branch gains."""
    map_is_branch: ClassVar[bool] = False
    """Whether the residual multiplier scales what the attention map adds to the identity, in place of a skip."""
    rotates: ClassVar[bool] = False
    """Whether an orthogonal matrix commutes with everything between its matrices: norms only before branches."""

    no_native_code: ClassVar[str | None] = "model/export/native/modeling_plumbline.py lacks it"
    """Why exports with our own code do not support it, or None if they do."""

    recomputed: Literal["none", "selective", "full"] = "none"
    """What is recomputed in the backward pass (`model.recomputation`)."""

    self_attn: Attention
    mlp: MLP

    def __init_subclass__(cls, **keys: Any) -> None:
        """Reset flags that would be inherited from another kind, since they only hold for what that kind computes."""
        super().__init_subclass__(**keys)
        state_anew(cls, Block, ("rotates", "no_native_code"))

    def __init__(self, config: ModelConfig, multipliers: Multipliers, layer: int) -> None:  # noqa: ARG002
        """Build block number `layer`.

        Args:
            config: the model's switches.
            multipliers: the parameterization's constants.
            layer: number of the block.
        """
        super().__init__()

    def attention_input(self, x: Tensor) -> Tensor:
        """Return the input of attention for the stream x [B, T, hidden_size], needed by model.value_residual."""
        raise NotImplementedError(f"{type(self).__name__}.attention_input")

    @classmethod
    def check_shape(cls, config: ModelConfig) -> None:
        """Refuse shapes that do not fit, beyond the checks of `needs`.

        Raises:
            ValueError: names keys and values.
        """

    @classmethod
    def needs_unit_stream(cls, _config: ModelConfig) -> bool:
        """Return whether branches read the stream as it is and are small beside one of unit size."""
        return False

    @classmethod
    def cautions(cls, _config: ModelConfig) -> list[str]:
        """Return warnings, a sentence each, about settings that are allowed but have been seen to fail."""
        return []
