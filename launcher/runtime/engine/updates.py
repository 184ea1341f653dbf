"""What one optimizer update does: gradients of queries and keys against values, how far each matrix moves, gains.

Weights are looked at in pieces, each rank its own shard of the fp32 master weights: nothing is gathered but, matrix by
matrix, the gradients of queries, keys and values.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.launcher.runtime.system.world import World
from plumbline.model.diagnostics.observer import Observation, layer_name
from plumbline.model.diagnostics.statistics import gain_sums, gradient_sums, update_sums


class UpdateWatch:
    """Looks at an engine right before and right after an update; adds what it sees to an observation.

    Between the two it holds a copy of this rank's shard of the matrices. Activations are gone by then, so this is not
    where memory peaks.

    Args:
        engine: the DeepSpeed engine.
        observation: of the same step.
        world: this process among all.
    """

    def __init__(self, engine: Any, observation: Observation, world: World) -> None:
        self.observation, self.world = observation, world
        self._engine = engine
        self._before: dict[str, Tensor] = {}
        self._learned = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
        self._layers = len(engine.module.model.layers)

    @torch.no_grad()
    def before(self) -> None:
        """With gradients reduced over ranks and not yet used; all ranks must call."""
        from deepspeed.utils import safe_get_full_grad  # after the accelerator is chosen in startup.start

        for number in range(self._layers):
            names = [f"model.layers.{number}.self_attn.{letter}_proj.weight" for letter in "qkv"]
            if all(name in self._learned for name in names):
                query, key, value = (safe_get_full_grad(self._learned[name]) for name in names)
                place = layer_name(number, self._layers)
                self.observation.add("grad", f"/{place}", gradient_sums(query, key, value))
        for name, parameter in self._learned.items():
            if _is_matrix(parameter):
                self._before[name] = self._piece(parameter).clone()

    @torch.no_grad()
    def after(self) -> None:
        """With the update applied, or skipped."""
        device = self.world.device
        for name, parameter in self._learned.items():
            piece = self._piece(parameter)
            if name in self._before:
                sums = update_sums(self._before.pop(name), piece)
                self.observation.add("update", self._rest(name), {key: x.to(device) for key, x in sums.items()})
            elif not name.endswith("bias"):
                sums = gain_sums(piece)
                self.observation.add("gain", self._rest(name), {key: x.to(device) for key, x in sums.items()})

    def _piece(self, parameter: nn.Parameter) -> Tensor:
        """This rank's part of the fp32 master weight, flat; perhaps empty."""
        from deepspeed.utils import safe_get_local_fp32_param

        stage, rank, ranks = self._engine.zero_optimization_stage(), self.world.rank, self.world.size
        if stage == 0:  # everyone has all of it: each looks at a share
            return parameter.detach().flatten().tensor_split(ranks)[rank]
        if stage == 3:
            padded: Tensor = safe_get_local_fp32_param(parameter)
            return padded[: max(0, parameter.ds_numel - rank * padded.numel())]  # type: ignore[attr-defined]
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        return torch.empty(0) if mapping is None else mapping.get_hp_fragment()

    def _rest(self, name: str) -> str:
        """model.layers.3.self_attn.q_proj.weight -> self_attn.q_proj/03; lm_head.weight -> lm_head/."""
        name = name.removesuffix(".weight")
        inside = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if inside is None:
            return f"{name.removeprefix('model.')}/"
        return f"{inside[2]}/{layer_name(int(inside[1]), self._layers)}"


def _is_matrix(parameter: nn.Parameter) -> bool:
    return len(getattr(parameter, "ds_shape", parameter.shape)) > 1
