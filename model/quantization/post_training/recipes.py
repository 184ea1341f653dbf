"""Define recipes of post-training quantization: what is rounded to which grid, and by which method.

A recipe is given by a systematic name, such as gptq-w4-g128-actorder or w8a8-static-smooth0.5 (`RULE`), or in full.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, ValidationError, ValidationInfo, field_validator
from pydantic import model_validator as validator

from plumbline.model.kinds import kind_named
from plumbline.model.quantization.post_training.awq import AWQ
from plumbline.model.quantization.post_training.gptq import GPTQ
from plumbline.model.quantization.post_training.method import RTN, Method
from plumbline.model.quantization.precision import BLOCK_FORMATS
from plumbline.model.quantization.quantizer import Granularity, Quantizer, Site

METHODS: dict[str, Method] = {"rtn": RTN, "gptq": GPTQ, "awq": AWQ}
DOWN_PROJECTIONS = ("down_proj", "mlp.c_proj", "dense_4h_to_h", "fc2")  # an MLP's second layer, in several classes
RULE = """\
  rtn-wB, gptq-wB, awq-wB   weights of B bits, a scale for each output channel; then -tensor or -gN (groups of N),
                            -asym (zero points), -mse (range of least squared error), -actorder (gptq)
  wBaC                      weights of B and inputs of C bits, a scale for each token; then -static, -dynamic (a scale
                            for each tensor), -token or -gN (weights in groups, too), -asym, -pP (percentile),
                            -downB (inputs of the down projection), -smoothA (SmoothQuant), -wtensor (weights: a scale
                            for each tensor, range of least squared error)
  fp8-eXmY, fp8-eXmY-row    float weights and inputs, a scale for each tensor, or each channel and token
  mxfp8, mxfp6, mxfp4, nvfp4, mxfp8_e5m2, mxfp6_e3m2   weights and inputs in blocks; then -w (weights only)
  kvB                       keys and values, a scale for each tensor; then -head, -token or -channel (keys by the
                            channel, values by the token), -asym
  and at the end of any of them -hadamard (rotated first)"""
WEIGHTS_ONLY = re.compile(rf"(?P<method>{'|'.join(METHODS)})-w(?P<bits>\d+)")
WEIGHTS_AND_INPUTS = re.compile(r"w(?P<bits>\d+)a(?P<input_bits>\d+)")
FLOAT = re.compile("fp8-(?P<format>e2m5|e3m4|e4m3|e5m2|e6m1)")
BLOCKS = re.compile("(?P<format>" + "|".join(sorted(BLOCK_FORMATS, key=len, reverse=True)) + ")")
CACHE_KINDS: dict[str, tuple[Granularity, Granularity]] = {
    "head": ("head", "head"),
    "token": ("token", "token"),
    "channel": ("channel", "token"),
}
CACHE = re.compile(r"kv(?P<bits>\d+)")


class Recipe(BaseModel, extra="forbid", frozen=True, strict=True):
    """Describe one way to quantize a trained model: the linear layers of its blocks, and its keys and values."""

    name: str
    """Name in reports."""
    method: str = "rtn"
    """How weights are rounded, one of METHODS: to nearest, with the error compensated in later columns (arXiv
    2210.17323), or to nearest after a search for input scales and ranges (arXiv 2306.00978)."""
    weights: Quantizer | None = None
    """Weights of the linear layers."""
    activations: Quantizer | None = None
    """Inputs of the linear layers."""
    static: bool = False
    """Whether the limits of the inputs are fixed by the calibration text: the extremes over it, or, for a range of
    percentiles, a running mean of those of its sequences. False: found for each input."""
    inputs: dict[str, Quantizer] = Field(default_factory=dict)
    """Exceptions from `activations`: end of a layer's name -> quantizer of its input."""
    keys: Quantizer | None = None
    """Keys, as a cache stores them."""
    values: Quantizer | None = None
    """Values, as a cache stores them."""
    smooth: float | None = Field(default=None, ge=0.0, le=1.0)
    """SmoothQuant's alpha (arXiv 2211.10438): how much of the inputs' range moves into the weights. None: none of
    it."""
    rotate: bool = False
    """First rotate the residual stream and the values of each head by a Hadamard matrix (arXiv 2404.00456)."""
    act_order: bool = False
    """gptq: process columns with the largest inputs first; groups have the grids of the unchanged weight."""
    damping: PositiveFloat = 0.01
    """gptq: added to the diagonal of the Hessian, as a share of its mean."""
    block_size: PositiveInt = 128
    """gptq: columns between two updates of all later ones; it only affects speed."""

    @field_validator("weights", "activations", "keys", "values")
    @classmethod
    def _fits(cls, value: Quantizer | None, info: ValidationInfo) -> Quantizer | None:
        sites: dict[str | None, Site] = {"weights": "weights", "activations": "activations"}
        if value is not None:
            value.check(sites.get(info.field_name, "kv_cache"))
        return value

    @field_validator("inputs")
    @classmethod
    def _inputs_fit(cls, value: dict[str, Quantizer]) -> dict[str, Quantizer]:
        for quantizer in value.values():
            quantizer.check("activations")
        return value

    @validator(mode="after")
    def _check(self) -> "Recipe":
        method = kind_named(METHODS, "method", self.method)
        if method.needs_text and self.weights is None:
            raise ValueError(f"method = {self.method} is about weights: say how they are rounded")
        ordered = " and ".join(name for name, each in METHODS.items() if each.orders_columns)
        if self.act_order and not method.orders_columns:
            raise ValueError(f"act_order = true, method = {self.method}: only {ordered} has an order of columns")
        for name in () if method.orders_columns else ("damping", "block_size"):
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} = {value:g}, method = {self.method}: only method = {ordered} reads it; set that, or leave "
                    f"{name} out"
                )
        if method.input_scale is not None and self.smooth is not None:
            raise ValueError(f"smooth = {self.smooth}, method = {self.method}: both choose input scales, leave one out")
        if self.inputs and self.activations is None:
            raise ValueError(f"inputs = {', '.join(self.inputs)}: exceptions from activations, which are not rounded")
        for quantizer in (self.activations, *self.inputs.values()) if self.static else ():
            if quantizer is None:
                raise ValueError("static = true is about activations: say how they are rounded")
            if quantizer.granularity not in ("tensor", "channel") or quantizer.range == "mse":
                raise ValueError(
                    f"static = true, granularity = {quantizer.granularity}, range = {quantizer.range}: limits can be "
                    "measured before for tensor and channel, and range absmax and percentile"
                )
        if not self.rounds_layers and self.keys is None and self.values is None and not self.rotate:
            raise ValueError("nothing is rounded: give weights, activations, keys or values")
        return self

    @property
    def needs_samples(self) -> bool:
        """Return whether the recipe needs calibration text."""
        return self.rounding.needs_text or self.static or self.smooth is not None

    @property
    def rounding(self) -> Method:
        """Return the method."""
        return METHODS[self.method]

    @property
    def rounds_layers(self) -> bool:
        """Return whether the recipe changes linear layers."""
        return any(each is not None for each in (self.weights, self.activations, self.smooth)) or bool(self.inputs)

    @property
    def revision(self) -> int:
        """Return how often what this recipe computes has changed since it could first be written like this.

        Static limits of percentiles are a running mean over sequences, where they were the largest over batches. Scales
        in e4m3 beside zero points have room for a block that spans the whole tensor.
        """
        inputs = [each for each in (self.activations, *self.inputs.values()) if each is not None]
        every = [*inputs, *(each for each in (self.weights, self.keys, self.values) if each is not None)]
        return int(self.static and any(each.range == "percentile" for each in inputs)) + int(
            any(each.scales == "e4m3" and not each.symmetric for each in every)
        )

    def input_quantizer(self, name: str) -> Quantizer | None:
        """Return the quantizer for the input of a layer, or None."""
        exception = next((each for end, each in self.inputs.items() if name.endswith(end)), None)
        return exception or self.activations


def named_recipe(name: str) -> Recipe:
    """Return the recipe with this name.

    Raises:
        ValueError: the name does not follow the rule; the message has the rule and similar names.
    """
    stem = name.removesuffix("-hadamard")
    kinds = (
        (WEIGHTS_ONLY, _weights_only),
        (WEIGHTS_AND_INPUTS, _weights_and_inputs),
        (FLOAT, _float),
        (BLOCKS, _blocks),
        (CACHE, _cache),
    )
    for pattern, settings in kinds:
        match = re.match(pattern.pattern + r"(?=-|$)", stem)
        if match is None:
            continue
        options = stem[match.end() :].split("-")[1:]
        try:
            fields = settings(match.groupdict(), options)
            if not options:
                return Recipe(name=name, rotate=stem != name, **fields)
        except ValidationError as error:
            first = error.errors()[0]
            place = "".join(f"{part} " for part in first["loc"])
            raise ValueError(f"recipe {name}: {place}{first['msg'].removeprefix('Value error, ')}") from None
    near = difflib.get_close_matches(name, SETS["all"], n=3, cutoff=0.5)
    hint = f"; near it: {', '.join(near)}" if near else ""
    raise ValueError(f"{name!r} is no recipe{hint}. Names are\n{RULE}\nand sets of them {', '.join(SETS)}")


def recipes(wanted: Sequence[str | Mapping[str, Any]]) -> tuple[Recipe, ...]:
    """Return the recipes given by names, sets of names (`SETS`) or full settings, without duplicates, in order.

    Raises:
        ValueError: there is no such recipe, its settings contradict each other, or two recipes share a name.
    """
    by_name: dict[str, Recipe] = {}
    for each in wanted:
        if isinstance(each, str):
            several = [named_recipe(name) for name in SETS.get(each, (each,))]
        else:
            several = [Recipe.model_validate(each)]
        for recipe in several:
            if by_name.setdefault(recipe.name, recipe) != recipe:
                raise ValueError(f"two recipes have the name {recipe.name}: rename one")
    return tuple(by_name.values())


def _flag(options: list[str], word: str) -> bool:
    """Remove the word from the options, and return whether it was there."""
    if word not in options:
        return False
    options.remove(word)
    return True


def _number(options: list[str], letters: str, number: str = r"\d+(?:\.\d+)?") -> str | None:
    """Remove the option made of these letters and a number, if any, and return the number."""
    for option in options:
        if match := re.fullmatch(f"{letters}({number})", option):
            options.remove(option)
            return match[1]
    return None


def _grouped(options: list[str]) -> dict[str, Any]:
    """Return settings for group granularity, if the options ask for it."""
    size = _number(options, "g", r"\d+")
    return {} if size is None else {"granularity": "group", "group_size": int(size)}


def _symmetry(options: list[str]) -> dict[str, Any]:
    """Return settings with zero points if the options ask for them, else symmetric ones that use all codes."""
    asymmetric = _flag(options, "asym")
    return {"symmetric": not asymmetric, "full_range": not asymmetric}


def _weights_only(parts: dict[str, str], options: list[str]) -> dict[str, Any]:
    granularity = _grouped(options) or {"granularity": "tensor" if _flag(options, "tensor") else "channel"}
    quantizer = Quantizer(
        format=f"int{parts['bits']}",
        **_symmetry(options),
        range="mse" if _flag(options, "mse") else "absmax",
        scales="fp16",
        **granularity,
    )
    return {"method": parts["method"], "weights": quantizer, "act_order": _flag(options, "actorder")}


def _weights_and_inputs(parts: dict[str, str], options: list[str]) -> dict[str, Any]:
    groups = _grouped(options)
    static = not groups and _flag(options, "static")
    dynamic = not groups and not static and _flag(options, "dynamic")
    kinds = {"granularity": "tensor"} if static or dynamic else {"granularity": "token"}
    if not (groups or static or dynamic):  # at most one of the four; leftover options are refused
        _flag(options, "token")
    percentile = _number(options, "p")
    inputs: dict[str, Any] = {**_symmetry(options), **(groups or kinds)}
    if percentile is not None:
        inputs |= {"range": "percentile", "percentile": float(percentile)}
    down, smooth = _number(options, "down"), _number(options, "smooth")
    exceptions = {} if down is None else dict.fromkeys(DOWN_PROJECTIONS, Quantizer(format=f"int{down}", **inputs))
    coarse = {"granularity": "tensor", "range": "mse"} if _flag(options, "wtensor") else {"granularity": "channel"}
    weights = Quantizer(format=f"int{parts['bits']}", full_range=True, scales="fp16", **(groups or coarse))
    return {
        "weights": weights,
        "activations": Quantizer(format=f"int{parts['input_bits']}", **inputs),
        "static": static,
        "inputs": exceptions,
        "smooth": None if smooth is None else float(smooth),
    }


def _float(parts: dict[str, str], options: list[str]) -> dict[str, Any]:
    rows = _flag(options, "row")
    weights = Quantizer(format=parts["format"], granularity="channel" if rows else "tensor")
    return {
        "weights": weights,
        "activations": Quantizer(format=parts["format"], granularity="token" if rows else "tensor"),
    }


def _blocks(parts: dict[str, str], options: list[str]) -> dict[str, Any]:
    quantizer = BLOCK_FORMATS[parts["format"]]
    return {"weights": quantizer, "activations": None if _flag(options, "w") else quantizer}


def _cache(parts: dict[str, str], options: list[str]) -> dict[str, Any]:
    kinds = next((CACHE_KINDS[word] for word in CACHE_KINDS if _flag(options, word)), ("tensor", "tensor"))
    shared: dict[str, Any] = {"format": f"int{parts['bits']}", **_symmetry(options)}
    return {site: Quantizer(granularity=kind, **shared) for site, kind in zip(("keys", "values"), kinds, strict=True)}


_WEIGHTS = (*(f"rtn-w{bits}" for bits in range(2, 9)), "gptq-w3", "gptq-w4")
_W8A8 = tuple(
    f"w8a8-{kind}{smooth}"
    for smooth in ("", "-smooth0.5", "-smooth0.8")
    for kind in ("static", "static-p99.999", "static-asym-p99.999-wtensor", "dynamic", "token")
)
_FP = (
    *(f"fp8-{format_}{row}" for format_ in ("e4m3", "e5m2") for row in ("", "-row")),
    *(f"{format_}{only}" for format_ in ("mxfp8", "mxfp6", "mxfp4", "nvfp4") for only in ("", "-w")),
)
_KV = tuple(f"kv{bits}{kind}" for bits in (2, 3, 4, 6, 8) for kind in ("", "-head", "-channel"))
_MORE_WEIGHTS = (
    *(f"rtn-w{bits}-{kind}" for bits in (3, 4, 8) for kind in ("tensor", "asym", "g128", "g64", "g32")),
    *(f"gptq-w{bits}" for bits in (2, 5, 6, 8)),
    *(f"gptq-w{bits}-{kind}" for bits in (3, 4) for kind in ("actorder", "g128", "g128-actorder")),
    *(f"awq-w{bits}-g128" for bits in (3, 4)),
)
_FEW_BITS = ("w4a8-token", "w4a4-token", "w4a4-g32", "w4a4-down8")
_ROTATED = ("rtn-w4-hadamard", "gptq-w4-hadamard", "w8a8-static-hadamard", "w4a4-token-hadamard", "kv4-hadamard")
SETS: dict[str, tuple[str, ...]] = {
    "weights": _WEIGHTS,
    "w8a8": _W8A8,
    "fp": _FP,
    "kv": _KV,
    "all": (*_WEIGHTS, *_MORE_WEIGHTS, *_W8A8, *_FEW_BITS, *_FP, *_KV, *_ROTATED),
}
"""Recipes by the name of a set."""
