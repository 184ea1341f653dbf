"""Scaling laws of precision: published values, what is refused, and what follows from a law against brute force."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize, minimize_scalar

from plumbline.model.scaling_laws.derived import (
    allocate,
    allocate_with_precision,
    critical_tokens,
    optimal_precision,
    precision_at_size,
)
from plumbline.model.scaling_laws.forms import FORMS, form_named, name_of
from plumbline.model.scaling_laws.law import Law
from plumbline.model.scaling_laws.points import points
from plumbline.model.scaling_laws.precision import PrecisionLaw
from plumbline.model.scaling_laws.published import KUMAR, PUBLISHED, published
from plumbline.model.scaling_laws.variants import FloatLaw, GranularityLaw, PowerLaw
from tests.benchmarks.law_recovery import kumar_grid

EXACT = np.inf  # bits
SIZES = np.array([30e6, 30e6, 220e6, 220e6])
TOKENS = np.array([1.5e9, 26e9, 1.5e9, 26e9])


def test_the_published_law_gives_the_known_losses_in_exact_arithmetic() -> None:
    losses = KUMAR.loss(points(SIZES, TOKENS, EXACT, EXACT, EXACT))
    assert losses == pytest.approx([4.101, 3.720, 3.577, 3.197], abs=5e-4)


@pytest.mark.parametrize(
    ("bits", "weights", "activations", "kv", "product"),
    [
        (4, 0.696, 0.331, 0.828, 0.191),
        (5, 0.791, 0.575, 0.939, 0.427),
        (6, 0.856, 0.730, 0.979, 0.611),
        (7, 0.901, 0.828, 0.992, 0.740),
        (8, 0.932, 0.891, 0.997, 0.828),
        (12, 0.985, 0.982, 1.000, 0.967),
        (16, 0.997, 0.997, 1.000, 0.994),
    ],
)
def test_each_part_keeps_the_known_share_of_the_parameters(
    bits: float, weights: float, activations: float, kv: float, product: float
) -> None:
    found = [float(KUMAR.fraction(index, np.array([float(bits)]))[0]) for index in ("w", "a", "kv")]
    assert found == pytest.approx([weights, activations, kv], abs=6e-4)
    assert KUMAR.efficiency(bits) == pytest.approx(product, abs=6e-4)


def test_bf16_counts_as_16_bits_and_not_as_exact() -> None:
    bf16, sixteen, exact = (
        float(KUMAR.loss(at))
        for at in (points(30e6, 26e9), points(30e6, 26e9, 16, 16, 16), points(30e6, 26e9, *[EXACT] * 3))
    )
    assert bf16 == sixteen
    assert 0.001 < bf16 - exact < 0.005


def test_low_precision_is_a_smaller_model() -> None:
    low = KUMAR.loss(points(220e6, 26e9, 5, 6, 7))
    share = np.prod([KUMAR.fraction(i, np.array(float(p))) for i, p in (("w", 5), ("a", 6), ("kv", 7))])
    assert float(low) == pytest.approx(float(KUMAR.loss(points(220e6 * share, 26e9, *[EXACT] * 3))))


@pytest.mark.parametrize(
    ("size", "deltas"), [(30e6, [0.586, 0.108, 0.0198, 0.0036]), (220e6, [0.295, 0.054, 0.010, 0.0018])]
)
def test_rounding_after_training_adds_the_known_nats(size: float, deltas: list[float]) -> None:
    at = points(size, 26e9, EXACT, EXACT, EXACT, post_bits=[3, 4, 5, 6])
    assert KUMAR.post_delta(at) == pytest.approx(deltas, rel=0.025)
    whole = points(size, 26e9, EXACT, EXACT, EXACT)
    assert KUMAR.loss(at) - KUMAR.loss(whole) == pytest.approx(KUMAR.post_delta(at))


@pytest.mark.parametrize(
    ("column", "bits", "threshold"),
    [("activation_bits", 3, "3.11"), ("kv_bits", 2, "2.32"), ("weight_bits", 0.8, "0.812")],
)
def test_bits_at_which_nothing_is_left_are_refused(column: str, bits: float, threshold: str) -> None:
    with pytest.raises(
        ValueError, match=rf"{column} = {bits:g}: f_\w+ is not positive at or below .* {threshold} bits"
    ):
        KUMAR.loss(points(30e6, [1e9, 2e9], **{column: [16, bits]}))


def test_what_the_paper_does_not_report_is_refused_unless_given() -> None:
    at = points(30e6, 26e9, 8, 8, 8, post_bits=4)
    with pytest.raises(ValueError, match=r"C_w: not known in this law, and needed for .* weight_bits = 8"):
        KUMAR.loss(at)
    given = replace(KUMAR, C_w=0.3, C_a=0.4, C_kv=0.5)
    tolerance = np.prod([1 - np.exp(-rate * 4) for rate in (0.3, 0.4, 0.5)])
    effective = 30e6 * KUMAR.efficiency(8)
    damage = 0.0598 * 26e9**0.5068 / effective**0.3439 * np.exp(-4 / 0.5907 + 1.1277)
    assert float(given.post_delta(at)) == pytest.approx(float(damage * tolerance))


def test_serving_as_wide_as_trained_adds_nothing() -> None:
    given = replace(KUMAR, C_w=0.3, C_a=0.4, C_kv=0.5)
    assert float(given.post_delta(points(30e6, 26e9, 8, 8, 8, post_bits=8))) == 0
    assert float(given.post_delta(points(30e6, 26e9, 5, 16, 16, post_bits=6))) == 0
    assert float(KUMAR.post_delta(points(30e6, 26e9, 5, 16, 16, post_bits=5))) == 0, "C_w is not needed for that"


@pytest.mark.parametrize(("activations", "kv", "named"), [(4, 16, "activation_bits = 4"), (16, 3, "kv_bits = 3")])
def test_weights_rounded_to_no_fewer_bits_than_inputs_had_are_outside_the_law(
    activations: float, kv: float, named: str
) -> None:
    """They lose something, and a factor of the law would say that they lose nothing or gain."""
    given = replace(KUMAR, C_w=0.3, C_a=0.4, C_kv=0.5)
    for law in (KUMAR, given):
        with pytest.raises(ValueError, match=rf"{named}: the law says nothing about weights .* take fewer post_bits"):
            law.post_delta(points(30e6, 26e9, 16, activations, kv, post_bits=4))
    assert float(given.post_delta(points(30e6, 26e9, 4, activations, kv, post_bits=4))) == 0, "they stay as they are"


def test_a_law_without_an_f_refuses_low_bits_and_knows_bf16() -> None:
    weights_only = replace(KUMAR, gamma_a=np.nan, gamma_kv=np.nan)
    assert weights_only.indices == ("w",)
    assert weights_only.efficiency(4) == pytest.approx(0.696, abs=5e-4)
    with pytest.raises(ValueError, match=r"activation_bits = 8: this law has no f_a"):
        weights_only.loss(points(30e6, 26e9, activation_bits=8))
    with pytest.raises(ValueError, match=r"C_T: not known"):
        replace(KUMAR, C_T=np.nan).loss(points(30e6, 26e9, post_bits=4))


def test_the_law_works_on_any_shape() -> None:
    table = KUMAR.loss(points(np.array([[30e6], [220e6]]), np.array([1.5e9, 6e9, 26e9]), 8, 8, 8))
    assert table.shape == (2, 3)
    assert float(table[1, 2]) == float(KUMAR.loss(points(220e6, 26e9, 8, 8, 8)))


@pytest.mark.parametrize(("column", "value"), [("parameters", 0.0), ("tokens", -1.0), ("post_bits", 0.0)])
def test_sizes_that_are_not_positive_are_refused(column: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{column} = {value:g}: must be positive"):
        points(**{"parameters": 1.0, "tokens": 1.0, column: value})


def test_too_much_data_begins_at_the_known_ratios() -> None:
    ratios = [critical_tokens(KUMAR, 30e6, bits) / 30e6 for bits in (3, 4, 5)]
    assert ratios == pytest.approx([177, 959, 5185], rel=3e-3)


@pytest.mark.parametrize(
    ("known", "bits"),
    [({}, 4), ({"C_w": 0.05, "C_a": 0.05, "C_kv": 0.05}, 3), ({"C_a": 0.2}, 6), ({"C_w": 0.01, "C_kv": 2.0}, 4)],
    ids=str,
)
def test_the_critical_data_size_is_where_the_loss_turns(known: dict[str, float], bits: int) -> None:
    law = replace(KUMAR, **known)
    found = minimize_scalar(
        lambda d: float(law.loss(points(60e6, np.exp(d), post_bits=bits))),
        bounds=(15.0, 35.0),
        method="bounded",
        options={"xatol": 1e-9},
    )
    assert critical_tokens(law, 60e6, bits) == pytest.approx(float(np.exp(found.x)), rel=1e-4)
    assert critical_tokens(replace(law, gamma_D=0.0), 60e6, bits) == np.inf, "more data never harms"


@pytest.mark.parametrize(
    ("constants", "expected"),
    [({"C_T": 1e-30, "beta": 0.05, "gamma_D": 1e-4}, np.inf), ({"gamma_D": -0.1}, np.inf), ({"B": 0.0}, 0.0)],
    ids=str,
)
def test_data_that_never_harms_or_never_helps_has_an_end_of_its_range(
    constants: dict[str, float], expected: float
) -> None:
    assert critical_tokens(replace(KUMAR, **constants), 60e6, 4) == expected


def test_the_optimal_precision_is_seven_bits_whatever_the_compute() -> None:
    assert optimal_precision(KUMAR) == pytest.approx(7.00, abs=5e-3)
    assert {round(allocate_with_precision(KUMAR, flops).bits, 6) for flops in (1e18, 1e24)} == {
        round(optimal_precision(KUMAR), 6)
    }


def cost_of(parameters: float, flops: float, bits: float) -> float:
    """Return the loss of C = (6/16) N D P."""
    tokens = flops / (6 / 16 * parameters * bits)
    return float(KUMAR.loss(points(parameters, tokens, bits, bits, bits)))


@pytest.mark.parametrize("bits", [5.0, 8.0, 16.0])
def test_the_split_at_fixed_precision_is_the_best_by_brute_force(bits: float) -> None:
    found = allocate(KUMAR, 1e20, bits)
    best = minimize_scalar(
        lambda n: cost_of(np.exp(n), 1e20, bits), bounds=(14.0, 30.0), method="bounded", options={"xatol": 1e-9}
    )
    assert found.parameters == pytest.approx(float(np.exp(best.x)), rel=1e-3)
    assert found.loss == pytest.approx(float(best.fun), abs=1e-9)
    assert 6 / 16 * found.parameters * found.tokens * found.bits == pytest.approx(1e20)


def test_the_free_split_is_the_best_by_brute_force() -> None:
    found = allocate_with_precision(KUMAR, 1e21)
    best = minimize(lambda x: cost_of(np.exp(x[0]), 1e21, x[1]), [20.0, 10.0], method="Nelder-Mead", tol=1e-10)
    assert found.bits == pytest.approx(float(best.x[1]), rel=1e-3)
    assert found.loss == pytest.approx(float(best.fun), abs=1e-8)


def test_a_split_of_untied_exponents_is_the_best_by_brute_force() -> None:
    law = published("besiroglu2404").law
    found = allocate(law, 1e21)
    others = np.geomspace(found.parameters / 100, found.parameters * 100, 20001)
    losses = law.loss(points(others, 1e21 / 6 / others))
    assert others[losses.argmin()] == pytest.approx(found.parameters, rel=1e-3)


def test_precision_at_a_fixed_size_is_the_best_and_grows_with_compute() -> None:
    bits = []
    for flops in (1e18, 1e20, 1e22, 1e24):
        found = precision_at_size(KUMAR, 30e6, flops)
        grid = np.linspace(3.2, 40, 3681)
        losses = KUMAR.loss(points(30e6, flops / (6 / 16 * 30e6 * grid), grid, grid, grid))
        assert found.bits == pytest.approx(grid[int(np.argmin(losses))], abs=0.02)
        assert found.parameters == 30e6
        bits.append(found.bits)
    steps = np.diff(bits)
    assert (steps > 0).all()
    assert steps[-1] == pytest.approx(steps[-2], rel=0.05), "as the logarithm of compute"


def test_a_law_without_an_optimum_says_so() -> None:
    with pytest.raises(ValueError, match="no maximum"):
        optimal_precision(PrecisionLaw(A=1.0, alpha=0.5, B=1.0, beta=0.5, E=1.0, gamma_w=2.0, n_w=-0.1))
    with pytest.raises(ValueError, match="knows no training precision"):
        optimal_precision(PrecisionLaw(A=1.0, alpha=0.5, B=1.0, beta=0.5, E=1.0))
    flat = PrecisionLaw(A=1.0, alpha=0.5, B=1e4, beta=0.5, E=1.0, gamma_w=2.0, n_w=-3.0)
    with pytest.raises(ValueError, match=r"at 3e\+07 parameters no precision is best: .* search, 0\.001 bits"):
        precision_at_size(flat, 30e6, 1e18)
    with pytest.raises(ValueError, match=r"no precision is best: .* search, 64 bits"):
        precision_at_size(replace(flat, A=1e9, B=0.0), 30e6, 1e18)


@pytest.mark.parametrize("name", ["A", "alpha", "B", "beta"])
@pytest.mark.parametrize("value", [0.0, -0.4])
def test_a_law_in_which_size_or_data_does_not_help_has_no_best_split(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} = {value:g}: under this law one of size and data does not help"):
        allocate(replace(KUMAR, **{name: value}), 1e20)


def test_forms_are_found_by_name() -> None:
    assert [name_of(form()) for form in FORMS.values()] == list(FORMS)
    with pytest.raises(ValueError, match="form 'kumar': unknown; one of precision, chinchilla, post_power, "):
        form_named("kumar")
    with pytest.raises(ValueError, match="law 'kumar': unknown; one of kumar2411, kumar2411-float, "):
        published("kumar")


def test_every_published_law_names_its_source_and_what_it_lacks() -> None:
    for name, entry in PUBLISHED.items():
        assert "arXiv 2" in entry.source, name
        whole = {"A", "alpha", "B", "beta", "E"} <= set(entry.law.constants)
        assert whole or "A, B, E" in entry.missing, name


def test_a_power_of_the_width_after_training() -> None:
    law = published("ouyang2411").law
    found = law.post_delta(points(1e9, 1e12, post_bits=[4, np.inf]))
    assert found == pytest.approx([0.017 * 1e12**0.5251 / (1e9**0.2261 * 4**5.4967), 0.0])
    with pytest.raises(ValueError, match="alpha, beta: not known"):
        law.loss(points(1e9, 1e12))
    whole = PowerLaw(A=400.0, alpha=0.3, B=2000.0, beta=0.4, E=1.8, k=0.017, gamma_D=0.5, gamma_N=0.2, gamma_P=5.5)
    at = points(1e9, 1e12, post_bits=3)
    assert float(whole.loss(at)) == pytest.approx(float(Law.loss(whole, points(1e9, 1e12)) + whole.post_delta(at)))


def test_training_in_groups_costs_more_the_larger_they_are() -> None:
    law = published("chen2505-w4a4").law
    found = law.training_delta(points(595e6, 100e9, [4, 4, 16], [4, 4, 16], group_size=[32, 256, 256]))
    expected = [0.1582 * 100e9**0.0745 * np.log2(group) ** 0.7779 / 595e6**0.2186 for group in (32, 256)]
    assert found == pytest.approx([*expected, 0.0])
    with pytest.raises(ValueError, match=r"group_size: missing in 1 point\(s\)"):
        law.training_delta(points(595e6, 100e9, 4, 4))


def test_float_formats_by_exponent_and_mantissa() -> None:
    constants = {"A": 400.0, "alpha": 0.3, "B": 2000.0, "beta": 0.4, "E": 1.8, "k": 1e-4, "delta_E": 3.0, "nu_M": 2.5}
    law = FloatLaw(**constants)
    at = points(1e9, 1e11, [4, 8, 16], [4, 8, 16], exponent_bits=[2, 4, np.nan], mantissa_bits=[1, 3, np.nan])
    size = 1e11**0.4 / 1e9**0.3
    expected = [1e-4 * size / (e**3.0 * m**2.5) for e, m in ((2.5, 1.5), (4.5, 3.5))]
    assert law.training_delta(at) == pytest.approx([*expected, 0.0])
    grouped = points(1e9, 1e11, 4, exponent_bits=2, mantissa_bits=1, group_size=[4, 16])
    ratio = replace(law, gamma_G=1.5).training_delta(grouped)
    assert ratio[1] / ratio[0] == pytest.approx(2**1.5)
    with pytest.raises(ValueError, match="weight_format: missing"):
        law.loss(points(1e9, 1e11, 4))


def test_the_grid_is_the_papers() -> None:
    at, runs = kumar_grid((3.0, 4.0))
    assert len(set(runs)) == 18 * 30
    assert len(at) == 18 * 32
    assert at.activation_bits.min() == at.kv_bits.min() == 4
    assert at.weight_bits.min() == 3
    assert np.isfinite(KUMAR.loss(at)).all()
    assert isinstance(GranularityLaw(), Law)
