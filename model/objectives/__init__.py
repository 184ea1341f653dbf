"""List the training objectives, one file each: what a step minimises, and what it needs besides the model.

A new one needs a configuration and a subclass of `objective.Objective` in a file here, and a member in the union below.
"""

from plumbline.model.objectives.latent_lookahead import LatentLookaheadConfig
from plumbline.model.objectives.multi_token import MultiTokenConfig
from plumbline.model.objectives.next_token import NextTokenConfig
from plumbline.model.objectives.registers import RegistersConfig
from plumbline.model.objectives.sequential_mtp import SequentialMTPConfig
from plumbline.model.objectives.silent_thoughts import SilentThoughtsConfig

ObjectiveConfig = (
    NextTokenConfig
    | LatentLookaheadConfig
    | SilentThoughtsConfig
    | MultiTokenConfig
    | SequentialMTPConfig
    | RegistersConfig
)
