"""Measure the rounding of a linear layer: errors of its weight and output, and how hard its input is to round."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.model.diagnostics.statistics import Sums, outlier_statistics, outlier_sums
from plumbline.model.quantization.layers import QuantizedLinear
from plumbline.model.quantization.post_training.calibration import CalibrationText
from plumbline.model.quantization.quantizer import Quantizer

TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class LayerReport:
    """Hold measurements of one rounded layer; those of inputs and outputs are None without calibration text.

    Inputs are measured as they are rounded: divided by the input scale, if the layer has one.
    """

    name: str
    """Name of the layer within the model."""
    shape: tuple[int, int]
    """Shape of its weight, [out, in]."""
    stored_bits: float
    """Bits per weight, including its share of scales and zero points, and of an input scale that no norm takes."""
    weight_error: float
    """|rounded - weight| / |weight|, in Frobenius norms."""
    output_sqnr: float | None
    """Signal-to-noise ratio of the output relative to the unrounded layer on the same input, in dB; infinite without
    noise."""
    input_kurtosis_channels: float | None
    """mean(s^4) / mean(s^2)^2 of the RMS s of each channel over all tokens, uncentred, from 1 to in (arXiv
    2405.19279)."""
    input_kurtosis_sequences: float | None
    """Fourth central moment over squared variance of all values of a sequence, averaged over sequences; 3 for normal
    ones (arXiv 2306.12929)."""
    input_mmr: float | None
    """max |x| / (lower) median |x| of a token, averaged over tokens; infinite where half of the values are 0."""
    input_absmax: float | None
    """Largest |x|."""


class Observer:
    """Compare a rounded layer with the layer that it replaces, as it runs."""

    def __init__(self, original: nn.Linear, rounded: QuantizedLinear, text: CalibrationText | None) -> None:
        """Observe `rounded` on this text from now on; without, only the weights are compared."""
        self.original, self.rounded, self.text = original, rounded, text
        self.sums: Sums = {}
        self.kurtoses: list[Tensor] = []
        self.largest = self.signal = self.noise = 0.0
        self.handle = rounded.register_forward_hook(self._see)

    def _see(self, layer: QuantizedLinear, arguments: tuple[Any, ...], output: Tensor) -> None:
        x = arguments[0]
        expected = self.original(x).double()
        self.signal += float(expected.square().sum())
        self.noise += float((output.double() - expected).square().sum())
        x = x if layer.input_scale is None else x / layer.input_scale
        assert self.text is not None, "without text no layer runs"
        x = self.text.by_sequence(x)
        for name, sums in outlier_sums(x).items():
            self.sums[name] = self.sums.get(name, torch.zeros_like(sums)) + sums
        self.kurtoses.append(sequence_kurtosis(x))
        self.largest = max(self.largest, float(x.abs().amax()))

    def report(self, name: str, weights: Quantizer | None, kept: Tensor | None = None) -> LayerReport:
        """Return the report and remove the hook.

        Args:
            name: of the layer.
            weights: the quantizer that rounded the weight.
            kept: input scale that is stored beside the weight.
        """
        self.handle.remove()
        before, after = self.original.weight.float(), self.rounded.weight.float()
        after = after if self.rounded.input_scale is None else after / self.rounded.input_scale
        shape = (self.rounded.out_features, self.rounded.in_features)
        bits = 8.0 * before.element_size() if weights is None else weights.stored_bits(shape)
        bits += 0.0 if kept is None else 8.0 * kept.element_size() / self.rounded.out_features
        error = float((after - before).norm() / before.norm().clamp_min(torch.finfo(before.dtype).tiny))
        if not self.sums:
            return LayerReport(name, shape, bits, error, None, None, None, None, None)
        sqnr = 10 * torch.log10(torch.tensor(self.signal / self.noise)).item() if self.noise else float("inf")
        outliers = outlier_statistics(self.sums)
        kurtosis = torch.cat(self.kurtoses).mean().item()
        return LayerReport(name, shape, bits, error, sqnr, outliers["kurt"], kurtosis, outliers["mmr"], self.largest)


def sequence_kurtosis(x: Tensor) -> Tensor:
    """Return the centred kurtosis of all values of each sequence, x [B, T, D] -> [B], fp64."""
    centred = x.double().flatten(1)
    centred = centred - centred.mean(1, keepdim=True)
    return centred.pow(4).mean(1) / centred.square().mean(1).square().clamp_min(TINY)
