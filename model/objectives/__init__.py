"""Training objectives, one file each: what a step minimises, and what that takes beside the model.

A new one is a configuration and a subclass of `objective.Objective` in a file here, and below a member of the union and
a case.
"""

from plumbline.model.config import ModelConfig
from plumbline.model.objectives.latent_lookahead import LatentLookahead, LatentLookaheadConfig
from plumbline.model.objectives.multi_token import MultiToken, MultiTokenConfig
from plumbline.model.objectives.next_token import NextToken, NextTokenConfig
from plumbline.model.objectives.objective import Objective
from plumbline.model.objectives.registers import Registers, RegistersConfig
from plumbline.model.objectives.sequential_mtp import SequentialMTP, SequentialMTPConfig
from plumbline.model.objectives.silent_thoughts import SilentThoughts, SilentThoughtsConfig
from plumbline.model.parameterization.multipliers import Multipliers

ObjectiveConfig = (
    NextTokenConfig
    | LatentLookaheadConfig
    | SilentThoughtsConfig
    | MultiTokenConfig
    | SequentialMTPConfig
    | RegistersConfig
)


def make_objective(config: ObjectiveConfig, model: ModelConfig, multipliers: Multipliers, seed: int = 0) -> Objective:
    """The objective of a run; its parameters are uninitialised.

    Args:
        config: which, and how.
        model: the model that it trains.
        multipliers: of that model.
        seed: of what it draws at random.
    """
    match config:
        case NextTokenConfig():
            return NextToken(config)
        case LatentLookaheadConfig():
            return LatentLookahead(config, model, seed)
        case SilentThoughtsConfig():
            return SilentThoughts(config, model, seed)
        case MultiTokenConfig():
            return MultiToken(config, model, multipliers)
        case SequentialMTPConfig():
            return SequentialMTP(config, model, multipliers)
        case RegistersConfig():
            return Registers(config, model, seed)
