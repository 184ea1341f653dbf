"""Build a decoder that is ready to be trained, in one call, by anybody's loop."""

import torch

from plumbline.model.combinations import check_model
from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.parameterization.config import OptimizerSettings, ParameterizationConfig
from plumbline.model.parameterization.initialization import initialize
from plumbline.model.parameterization.multipliers import multipliers
from plumbline.model.parameterization.table import parameter_table

STANDARD = ParameterizationConfig(rule="sp")
ANY = OptimizerSettings(lr=1.0, weight_decay=0.0, eps=1e-8)  # the first values depend on none of them


def build_decoder(
    config: ModelConfig,
    parameterization: ParameterizationConfig = STANDARD,
    seed: int = 1,
    device: str | torch.device | None = None,
) -> CausalLM:
    """Return a decoder in fp32, in training mode, with the first values of a run of this seed.

    Args:
        config: its shape.
        parameterization: scales its forward pass and its first values.
        seed: `run.seed` of a run that starts from the same values.
        device: where it goes; None: the first GPU, or the CPU where there is none.

    Raises:
        ValueError: the model cannot be built so, or the parameterization does not fit it.
    """
    check_model(config)
    model = CausalLM(config, multipliers(config, parameterization))
    initialize(model, parameter_table(config, parameterization, ANY), seed)
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
