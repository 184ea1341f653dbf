"""Training objectives, one file each: what a step minimises, and what that takes beside the model.

A new one is a configuration and a subclass of `objective.Objective` in a file here, and two lines below.
"""

from model.config import ModelConfig
from model.objectives.latent_lookahead import LatentLookahead, LatentLookaheadConfig
from model.objectives.next_token import NextToken, NextTokenConfig
from model.objectives.objective import Objective

ObjectiveConfig = NextTokenConfig | LatentLookaheadConfig


def make_objective(config: ObjectiveConfig, model: ModelConfig, seed: int = 0) -> Objective:
    """The objective of a run; its parameters are uninitialised.

    Args:
        config: which, and how.
        model: the model that it trains.
        seed: of what it draws at random.
    """
    if isinstance(config, LatentLookaheadConfig):
        return LatentLookahead(config, model, seed)
    return NextToken(config)
