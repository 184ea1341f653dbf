"""Add the rotary entries that readers of transformers 4 expect in config.json, and find entries that some ignore."""

from collections.abc import Mapping
from typing import Any

UNREAD = ("hidden_act", "hidden_activation", "activation_function", "use_sliding_window")
"""Entries for which llama.cpp and CTranslate2 assume what published models of the class have (docs/export.md)."""


def unread_entries(config: Mapping[str, Any], usual: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the entries that such engines do not read, and would have to.

    Args:
        config: of the folder.
        usual: the defaults of its class in transformers, which are those of published models.
    """
    return tuple(f"{key}: {config[key]}" for key in UNREAD if key in config and config[key] != usual.get(key))


def older_rope_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_theta` and related entries, copied from `rope_parameters`.

    Readers that do not know `rope_parameters` silently use a class's default if these are missing. Scaled positions are
    left out where transformers 5 would misinterpret them: in classes with partial rotation, which are newer than those
    readers, and in classes with two kinds of layers.
    """
    ropes = config.get("rope_parameters")
    if not ropes:
        return {}
    if ropes.keys() == {"full_attention", "sliding_attention"}:
        full, sliding = (ropes[kind]["rope_theta"] for kind in ("full_attention", "sliding_attention"))
        return {"rope_theta": full, "rope_local_base_freq": sliding}
    if "rope_theta" not in ropes or "partial_rotary_factor" in ropes:
        return {}
    scaling = {key: value for key, value in ropes.items() if key != "rope_theta"}
    scaled = {} if scaling.get("rope_type", "default") == "default" else {"rope_scaling": scaling}
    return {"rope_theta": ropes["rope_theta"], **scaled}
