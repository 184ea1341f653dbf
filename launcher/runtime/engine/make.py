"""Choose the engine of a run."""

from collections.abc import Mapping

from torch import Tensor

from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.any_ranks import AnyRanksEngine
from plumbline.launcher.runtime.engine.base import Engine
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.ranks.world import World


def make_engine(
    config: Config, world: World, weights: Mapping[str, Tensor] | None = None, restored: bool = False
) -> Engine:
    """Return the engine that a configuration asks for; all ranks must call.

    Args:
        config: the run.
        world: this process among all; the process group must be up.
        weights: by name, instead of those that the seed draws.
        restored: all weights will be restored from a checkpoint, and none is drawn.

    Raises:
        ConfigError: see `build_for_training`.
    """
    kind = DeepSpeedEngine if config.run.reproducible is None else AnyRanksEngine
    return kind(config, world, weights, restored)
