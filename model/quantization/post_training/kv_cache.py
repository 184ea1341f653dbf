"""Round keys and values in a trained model: ours with `as_stored`, a Hugging Face model's with a rounding cache."""

from inspect import signature
from typing import Any

from torch import Tensor, nn

from plumbline.model.attention import attention_kind
from plumbline.model.attention.kind import Attention
from plumbline.model.decoder import CausalLM
from plumbline.model.quantization.precision import StoredRounded
from plumbline.model.quantization.quantizer import Quantizer
from plumbline.model.stock_inputs import CACHE, DOCUMENT_MASK, cache_argument


def check_kv_cache(model: nn.Module, *quantizers: Quantizer | None) -> None:
    """Refuse models whose keys and values cannot be rounded by these quantizers.

    Raises:
        ValueError: says why.
    """
    if isinstance(model, CausalLM):
        if not attention_kind(model.config).rounds_stored:
            kind = model.config.attention
            raise ValueError(
                f"model.attention = {kind}: its cache is not rounded; take a recipe without keys and values"
            )
    elif not hasattr(model.config, "get_text_config"):
        raise ValueError(f"{type(model).__name__}: neither a CausalLM nor a model of transformers")
    elif getattr(model.config, DOCUMENT_MASK, False) and not _attentions(model):
        raise ValueError(f"{type(model).__name__}: no module is known to keep keys and values, so none are rounded")
    width = _head_width(model)
    for quantizer in quantizers:
        size = None if quantizer is None else quantizer.group_size
        if size is not None and width is not None and width % size:
            raise ValueError(f"group_size = {size} does not divide the {width} values that a head stores of a token")


def _head_width(model: nn.Module) -> int | None:
    """Return the width of keys and values, or None if they differ in a transformers model."""
    config: Any = model.config if isinstance(model, CausalLM) else model.config.get_text_config()  # type: ignore[operator, union-attr]
    if hasattr(config, "v_head_dim"):
        return None
    width: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return width


def round_kv_cache(model: nn.Module, keys: Quantizer | None, values: Quantizer | None) -> None:
    """Make a model attend to rounded keys and values, as a cache would hold them, in place.

    A transformers model gets a rounding cache whenever its caller passes none; `generate`, which passes its own, is not
    affected. With a cache, transformers does not keep the documents of a sample apart: where `stock_inputs` asks for
    none, each attention gets one of its own.

    Args:
        model: a CausalLM, or a causal language model of transformers.
        keys: how keys are rounded, after QK-norm and rotary embedding; None keeps them as the model was trained.
        values: how values are rounded, likewise.
    """
    check_kv_cache(model)
    if isinstance(model, CausalLM):
        for module in model.modules():
            if isinstance(module, Attention):
                own = module.as_stored if isinstance(module.as_stored, StoredRounded) else StoredRounded(None, None)
                module.as_stored = StoredRounded(keys or own.keys, values or own.values)
        return
    stored = StoredRounded(keys, values)

    def give_cache(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if kwargs.get("use_cache") is False:
            return None
        given = give_own(model, args, kwargs)
        return given and (args, {**given[1], "use_cache": True})

    def give_own(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if any(kwargs.get(name) is not None for name in CACHE):
            return None
        return args, {**kwargs, cache_argument(module): _rounding_cache(model.config, stored)}

    model.register_forward_pre_hook(give_cache, with_kwargs=True)
    for attention in _attentions(model) if getattr(model.config, DOCUMENT_MASK, False) else ():
        attention.register_forward_pre_hook(give_own, with_kwargs=True)


def _attentions(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a transformers model that put keys and values into a cache."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "layer_idx") and cache_argument(module) in signature(module.forward).parameters
    ]


def _rounding_cache(config: Any, stored: StoredRounded) -> Any:
    """Return a transformers cache for one model's layers that rounds its entries."""
    from transformers import DynamicCache  # an optional dependency, and slow to load

    class RoundingCache(DynamicCache):  # type: ignore[misc]
        """Round keys and values [B, heads, tokens, head_dim] when they are added."""

        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            """Return all keys and values of the layer so far."""
            return super().update(*stored(key_states, value_states), layer_idx, *args, **kwargs)

    return RoundingCache(config=config)
