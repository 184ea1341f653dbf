"""Build a decoder, ready to be trained by any training loop, in one call."""

import torch

from plumbline.model.combinations import check_model
from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.parameterization.config import OptimizerSettings, ParameterizationConfig
from plumbline.model.parameterization.initialization import initialize
from plumbline.model.parameterization.multipliers import multipliers
from plumbline.model.parameterization.table import parameter_table

STANDARD = ParameterizationConfig(rule="sp")
ANY = OptimizerSettings(lr=1.0, weight_decay=0.0, eps=1e-8)  # the first values do not depend on these


def build_decoder(
    config: ModelConfig,
    parameterization: ParameterizationConfig = STANDARD,
    seed: int = 1,
    device: str | torch.device | None = None,
) -> CausalLM:
    """Return a decoder in fp32 and training mode, with the first values of a run with this seed.

    Args:
        config: its shape.
        parameterization: scales its forward pass and its first values.
        seed: `run.seed` of a run that starts from the same values.
        device: its device; None means the first GPU, or the CPU if there is none.

    Raises:
        ValueError: the switches exclude each other, or the parameterization does not fit the model.
    """
    check_model(config)
    model = CausalLM(config, multipliers(config, parameterization))
    initialize(model, parameter_table(config, parameterization, ANY), seed)
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
