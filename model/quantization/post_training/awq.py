"""Give weights of large inputs finer grids, with input scales and clipped ranges (AWQ, arXiv 2306.00978).

Both searches minimise the squared error of the layers' outputs on the calibration text. With M = sum of x x^T, a weight
error E gives an output error of tr(E M E^T), so M is all they need.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from plumbline.model.quantization.post_training.method import Method, MethodSettings, on_grid
from plumbline.model.quantization.quantizer import Grid, Quantizer

ALPHAS = [step / 20 for step in range(20)]
CLIPS = [1 - step / 20 for step in range(1, 11)]
LEAST = 1e-4  # smallest scale, before centring around 1


def awq_scale(weights: Sequence[Tensor], quantizer: Quantizer, mean_size: Tensor, products: Tensor) -> Tensor | None:
    """Return the scale that divides inputs and multiplies columns of layers: mean|x|^alpha for the best alpha.

    Args:
        weights: weights of the layers that share the input, [out, in] each.
        quantizer: quantizer of all of them.
        mean_size: mean |x| of each input, [in].
        products: sum of x x^T, [in, in].

    Returns:
        [in], centred around 1, or None if alpha = 0 is best, which changes nothing.
    """
    scales = [_centred(mean_size.float() ** alpha) for alpha in ALPHAS]
    errors = [_error_of(weights, quantizer, scale, products) for scale in scales]
    best = errors.index(min(errors))
    return scales[best] if best else None


def awq_grid(weight: Tensor, quantizer: Quantizer, products: Tensor) -> Grid:
    """Return the grid of a weight [out, in] whose ranges are clipped to the best share, from 1/2 to 1, for its output.

    Each group is judged alone, as if the others of its row were exact.
    """
    view, _ = quantizer.blocked(weight, "weights")
    products = products.float()
    if quantizer.group_size is None:
        whole = quantizer.granularity == "tensor"

        def error(missed: Tensor) -> Tensor:
            rows = ((missed @ products) * missed).sum(-1, keepdim=True)
            return rows.sum(0, keepdim=True) if whole else rows

    else:
        size, groups = quantizer.group_size, weight.size(1) // quantizer.group_size
        own = products.view(groups, size, groups, size).diagonal(dim1=0, dim2=2)  # (size, size, groups)

        def error(missed: Tensor) -> Tensor:
            return torch.einsum("ogi,ijg,ogj->og", missed, own, missed)[..., None]

    return quantizer.search(view, quantizer.limits(weight, "weights"), error, CLIPS)


def _centred(scale: Tensor) -> Tensor:
    scale = scale.clamp_min(LEAST)
    return scale / (scale.max() * scale.min()).sqrt()


def _error_of(weights: Sequence[Tensor], quantizer: Quantizer, scale: Tensor, products: Tensor) -> float:
    """Return the squared error of all outputs."""
    total = 0.0
    for weight in weights:
        missed = (quantizer.fake_quantize(weight * scale, "weights") / scale - weight).to(products.dtype)
        total += float(((missed @ products) * missed).sum())
    return total


def _round(
    weight: Tensor, products: Tensor | None, quantizer: Quantizer, _settings: MethodSettings
) -> tuple[Tensor, Grid]:
    assert products is not None, "a recipe that needs text is refused without"
    return on_grid(weight, awq_grid(weight, quantizer, products), quantizer)


AWQ = Method(_round, needs_text=True, input_scale=awq_scale)
