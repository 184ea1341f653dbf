"""Every block family: its wiring against its formula, causality, the KV cache, what starts as what, what trains."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plumbline.model.attention import ATTENTIONS
from plumbline.model.attention.shaped import ShapedAttention
from plumbline.model.blocks import BLOCKS
from plumbline.model.combinations import cautions
from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.families import FAMILIES
from plumbline.model.norms import make_norm
from plumbline.model.parameterization.config import OptimizerSettings, ParameterizationConfig
from plumbline.model.parameterization.initialization import initialize
from plumbline.model.parameterization.multipliers import multipliers
from plumbline.model.parameterization.table import parameter_table

MakeConfig = Callable[..., ModelConfig]
MakeModel = Callable[..., CausalLM]

BASE = OptimizerSettings(lr=0.01, weight_decay=0.1, eps=1e-8)
SP = ParameterizationConfig(rule="sp")
R = 1 / 3  # the residual multiplier of make_model's parameterization

SHAPES: list[dict[str, Any]] = [
    *({"family": family} for family in FAMILIES),
    {"family": "sas", "parallel": True},
    {"parallel": True, "branch_gain": "scalar"},
    {"block": "sandwich_norm", "norm": "single_scale_rmsnorm", "embedding_projection": True},
    {"family": "outlier_protected", "branch_gain": "vector", "qk_norm": "none", "attn_logit_softcapping": 2.0},
    {"attention_sink": True, "sliding_window": 5, "num_key_value_heads": 2},
    {"attention_gate": "head", "value_residual": True, "num_key_value_heads": 2},
    {"attention_gate": "elementwise", "value_residual": True, "block": "post_norm"},
    {"attention": "shaped", "num_key_value_heads": 2, "skip_gain": 0.6},
    {"family": "mixit", "num_key_value_heads": 2},
    {"attention": "pruned", "pruning_rank": 8, "num_key_value_heads": 2},
]


def test_every_kind_of_block_and_attention_is_among_the_shapes(make_config: MakeConfig) -> None:
    configs = [make_config(**shape) for shape in SHAPES]
    assert {config.block for config in configs} == set(BLOCKS)
    assert {config.attention for config in configs} == set(ATTENTIONS)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if "parallel" not in shape])
@torch.no_grad()
def test_a_block_runs_its_branches_in_parallel_or_refuses_to(make_model: MakeModel, shape: dict[str, Any]) -> None:
    try:
        parallel = make_model(**{**shape, "parallel": True})
    except ValueError as error:
        assert "parallel" in str(error)  # noqa: PT017 - it may as well not be refused
        return
    one_after_the_other = make_model(**{**shape, "parallel": False})
    there = dict(one_after_the_other.named_parameters())
    for name, parameter in parallel.named_parameters():
        parameter.copy_(there[name])
    assert not torch.equal(parallel(tokens()), one_after_the_other(tokens()))


def tokens(length: int = 21) -> Tensor:
    return torch.randint(61, (2, length), generator=torch.Generator().manual_seed(1))


def started(config: ModelConfig, rule: ParameterizationConfig = SP, seed: int = 0) -> CausalLM:
    """Start as training does."""
    model = CausalLM(config, multipliers(config, rule)).eval()
    initialize(model, parameter_table(config, rule, BASE), seed)
    return model


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_a_token_changes_nothing_before_it_and_something_after(make_model: MakeModel, shape: dict[str, Any]) -> None:
    model = make_model(**shape)
    before = tokens()
    after = before.clone()
    after[:, 9] = (after[:, 9] + 1) % 61
    change = (model(before) - model(after)).abs().amax(-1)
    assert change[:, :9].max() == 0
    assert (change[:, 9:11] > 0).all()


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_a_cache_gives_the_logits_of_the_full_forward(make_model: MakeModel, shape: dict[str, Any]) -> None:
    model = make_model(**shape)
    whole, cache = model(tokens()), model.new_cache(2, 21)
    pieces = [model(piece, cache=cache) for piece in tokens().split([6, 1, 1, 9, 4], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def pieces_of(model: CausalLM) -> tuple[Any, Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Return the second block, a stream, what the block makes of it, and its attention branch."""
    block: Any = model.model.layers[1]
    seen: list[Any] = []
    hook = block.register_forward_hook(lambda _m, inputs, output: seen.extend((*inputs[:2], output)))
    model(tokens())
    hook.remove()
    x, context, output = seen
    return block, x, output, lambda stream: block.self_attn(stream, context)


@torch.no_grad()
def test_pre_norms_act_on_what_the_branches_read(make_model: MakeModel) -> None:
    b, x, found, attention = pieces_of(make_model(branch_gain_init=0.7))
    y = x + R * 0.7 * attention(b.input_layernorm(x))
    torch.testing.assert_close(found, y + R * 0.7 * b.mlp(b.post_attention_layernorm(y)))


@torch.no_grad()
def test_a_single_scale_norm_has_one_gain(make_config: MakeConfig) -> None:
    norm = make_norm(make_config(norm="single_scale_rmsnorm", norm_eps=1e-3))
    (scale,) = norm.parameters()
    scale.fill_(1.7)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(norm(x), 1.7 * x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt())


@torch.no_grad()
def test_post_norms_act_on_what_the_branches_return(make_model: MakeModel) -> None:
    b, x, found, attention = pieces_of(make_model(family="fog"))
    y = x + R * b.post_attention_layernorm(attention(x))
    torch.testing.assert_close(found, y + R * b.post_feedforward_layernorm(b.mlp(y)))


@torch.no_grad()
def test_a_sandwich_has_norms_on_both_sides(make_model: MakeModel) -> None:
    b, x, found, attention = pieces_of(make_model(block="sandwich_norm"))
    y = x + R * b.post_attention_layernorm(attention(b.input_layernorm(x)))
    expected = y + R * b.post_feedforward_layernorm(b.mlp(b.pre_feedforward_layernorm(y)))
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_norm_free_branches_are_multiplied_by_their_gain(make_model: MakeModel) -> None:
    b, x, found, attention = pieces_of(make_model(family="outlier_protected", skip_gain=0.9))
    skip = 0.9 ** (1 / 3)  # three times the base's depth
    y = skip * x + R * 0.2 * attention(x)
    torch.testing.assert_close(found, skip * y + R * 0.2 * b.mlp(y))
    for kind in ("scalar", "vector"):
        b, x, found, attention = pieces_of(make_model(family="outlier_protected", branch_gain=kind))
        gains = [r.scalar if kind == "scalar" else r.gain for r in (b.attn_residual, b.mlp_residual)]
        assert [len(gain) for gain in gains] == [1 if kind == "scalar" else 32] * 2
        y = x + R * gains[0] * attention(x)
        torch.testing.assert_close(found, y + R * gains[1] * b.mlp(y))


@torch.no_grad()
def test_parallel_branches_read_one_norm(make_model: MakeModel) -> None:
    b, x, found, attention = pieces_of(make_model(parallel=True))
    normed = b.input_layernorm(x)
    torch.testing.assert_close(found, x + R * attention(normed) + R * b.mlp(normed))


@torch.no_grad()
def test_a_skipless_block_has_no_skip_around_attention(make_model: MakeModel) -> None:
    b, x, found, attention = pieces_of(make_model(family="sas"))
    y = attention(b.input_layernorm(x))
    torch.testing.assert_close(found, y + R * b.mlp_residual.scalar * b.mlp(b.post_attention_layernorm(y)))
    b, x, found, attention = pieces_of(make_model(family="sas", parallel=True))
    normed = b.input_layernorm(x)
    torch.testing.assert_close(found, attention(normed) + R * b.mlp_residual.scalar * b.mlp(normed))


@torch.no_grad()
def test_skipless_attention_starts_as_the_identity_on_the_stream(make_config: MakeConfig) -> None:
    b, x, _, attention = pieces_of(started(make_config(family="sas")))
    assert b.self_attn.q_proj.weight.abs().max() == 0
    torch.testing.assert_close(attention(x), x)
    assert {name for name, _ in b.self_attn.named_parameters()} == {"q_proj.weight", "k_proj.weight", "shape_gains"}
    first = started(make_config(family="sas")).model.layers[0]
    assert "self_attn.v_proj.weight" in dict(first.named_parameters())


@torch.no_grad()
@pytest.mark.parametrize("gains", ["fixed", "learned"])
def test_what_a_skipless_map_adds_to_the_identity_is_scaled_with_depth(make_model: MakeModel, gains: str) -> None:
    b, x, _, attention = pieces_of(make_model(family="sas", shaped_gains=gains))
    assert isinstance(b.self_attn, ShapedAttention)
    scaled = attention(x)
    assert b.self_attn.residual == R != 1
    b.self_attn.residual = 1.0
    torch.testing.assert_close(scaled - x, R * (attention(x) - x))
    assert (scaled - x).abs().max() > 0.01


@torch.no_grad()
@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize(
    ("norm", "name"),
    [("rmsnorm", "input_layernorm.weight"), ("layernorm", "input_layernorm.bias"), ("rmsnorm", "shape_gains")],
)
def test_gains_on_a_skipless_stream_move_it_alike_at_every_depth(
    make_config: MakeConfig, alpha: float, norm: str, name: str
) -> None:
    """Each by a step of the size that its row of the table gives, of one sign per head, as gradients may agree."""
    rule = ParameterizationConfig(rule="depth_alpha", depth_alpha=alpha, base_hidden_size=32, base_num_hidden_layers=2)
    moved = []
    for depth in (8, 64):  # whose first block has a value projection, which mixes channels
        config = make_config(
            family="sas", norm=norm, norm_bias=norm == "layernorm", num_hidden_layers=depth, final_norm=False
        )
        model, streams = started(config, rule), list[Tensor]()
        model.model.layers[-1].register_forward_hook(lambda _m, _i, output, kept=streams: kept.append(output))
        model(tokens())
        for row in parameter_table(config, rule, BASE):
            if row.name.endswith(name):
                parameter = model.get_parameter(row.name)
                signs = torch.ones(parameter.shape).mul_(torch.arange(parameter.size(-1)) % 2 * 2 - 1)
                parameter.add_(signs, alpha=0.1 * row.lr_multiplier)
        model(tokens())
        moved.append(float((streams[1] - streams[0]).norm() / streams[0].norm()))
    assert moved[0] > 0.01
    assert moved[1] == pytest.approx(moved[0], rel=0.3)


@torch.no_grad()
def test_without_a_final_norm_the_head_reads_the_stream(make_model: MakeModel) -> None:
    model = make_model(family="outlier_protected", embedding_projection=True)
    streams: list[Tensor] = []
    model.model.layers[-1].register_forward_hook(lambda _m, _i, output: streams.append(output))
    firsts: list[Tensor] = []
    model.model.layers[0].register_forward_pre_hook(lambda _m, inputs: firsts.append(inputs[0]))
    logits = model(tokens())
    head, decoder = model.lm_head, model.model
    assert decoder.embed_projection is not None
    assert decoder.output_projection is not None
    expected = streams[0] @ decoder.output_projection.weight.T @ head.weight.T * model.multipliers.output
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    embedded = decoder.embed_tokens(tokens()) * 1.7 @ decoder.embed_projection.weight.T
    torch.testing.assert_close(firsts[0], embedded)


@pytest.mark.parametrize(
    ("shape", "suffix", "value"),
    [
        ({"family": "outlier_protected", "branch_gain": "vector"}, "attn_residual.gain", 0.2),
        ({"family": "outlier_protected", "branch_gain": "scalar"}, "mlp_residual.scalar", 0.2),
        ({"family": "fog"}, "post_attention_layernorm.weight", 0.2),
        ({"family": "fog"}, "post_feedforward_layernorm.weight", 0.2),
        ({"family": "fog"}, "q_norm.weight", 2**0.25),
        ({"family": "olmo2", "qk_norm_init": 1.5}, "k_whole_norm.weight", 1.5),
        ({"branch_gain_init": 0.3}, "post_attention_layernorm.weight", 1.0),
        ({"block": "sandwich_norm", "branch_gain_init": 0.3}, "input_layernorm.weight", 1.0),
        ({"block": "sandwich_norm", "branch_gain_init": 0.3}, "post_attention_layernorm.weight", 0.3),
        ({"norm": "single_scale_rmsnorm"}, "input_layernorm.scale", 1.0),
        ({"norm": "single_scale_rmsnorm"}, "model.norm.scale", 1.0),
        ({"norm": "layernorm", "norm_bias": True, "block": "post_norm"}, "feedforward_layernorm.bias", 0.0),
        ({"mlp_input_scale": 2.5}, "mlp.input_scale", 2.5),
        ({"attention_sink": True}, "sinks", 0.0),
        ({"value_residual": True}, "value_mix", 0.5),
        ({"family": "sas"}, "shape_gains", 1.0),
        ({"mlp": "xielu"}, "alpha_p", 0.2033),  # ln(e^0.8 - 1)
        ({"mlp": "xielu"}, "alpha_n", -1.0502),  # ln(e^0.3 - 1)
    ],
)
def test_what_gains_start_from(make_config: MakeConfig, shape: dict[str, Any], suffix: str, value: float) -> None:
    model = started(make_config(**shape))
    found = [weight for name, weight in model.named_parameters() if name.endswith(suffix)]
    assert found
    for weight in found:
        assert weight.unique().tolist() == pytest.approx([value], abs=1e-4)


@torch.no_grad()
def test_embedding_projections_start_orthogonal(make_config: MakeConfig) -> None:
    rule = ParameterizationConfig(rule="mup", base_hidden_size=8)
    decoder = started(make_config(embedding_projection=True), rule).model
    assert decoder.embed_projection is not None
    assert decoder.output_projection is not None
    first, last = decoder.embed_projection.weight, decoder.output_projection.weight
    for matrix in (first, last):
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(32), atol=1e-5, rtol=0)
    assert not torch.equal(first, last)


@pytest.mark.parametrize(
    ("shape", "frozen"),
    [
        ({}, ()),
        ({"family": "fog"}, (".q_norm.", ".k_norm.")),
        ({"family": "olmo2", "qk_norm_frozen": True}, (".q_whole_norm.", ".k_whole_norm.")),
        ({"family": "mixit"}, (".mixing",)),
        ({"frozen_qk": True, "attention_bias": True}, (".q_proj.", ".k_proj.")),
        ({"frozen_mlp": True, "mlp": "xielu", "mlp_bias": True}, (".mlp.",)),
    ],
)
def test_what_is_frozen_stays_and_the_rest_gets_a_gradient(
    make_config: MakeConfig, shape: dict[str, Any], frozen: tuple[str, ...]
) -> None:
    config = make_config(**shape)
    model, rows = started(config), {row.name: row for row in parameter_table(config, SP, BASE)}
    loss = model(tokens()[:, :-1], labels=tokens()[:, 1:])[0]
    loss.backward()
    for name, parameter in model.named_parameters():
        is_frozen = any(part in name for part in frozen)
        assert (rows[name].trainable, parameter.requires_grad) == (not is_frozen, not is_frozen), name
        assert (parameter.grad is None) == is_frozen, name


def test_scalars_sum_their_gradient_over_channels_and_vectors_do_not(make_config: MakeConfig) -> None:
    """So eps shrinks with width for the second kind only; lr and decay are those of norms."""
    rule = ParameterizationConfig(
        rule="depth_alpha", depth_alpha=0.5, base_hidden_size=8, base_num_hidden_layers=1
    )  # m_N = 4, m_L = 3
    block_eps, block_lr = 3**-0.5, 3**-0.5
    for shape, eps in (
        ({"branch_gain": "scalar"}, {"attn_residual.scalar": block_eps}),
        ({"branch_gain": "vector"}, {"attn_residual.gain": block_eps / 4}),
        ({"norm": "single_scale_rmsnorm"}, {"input_layernorm.scale": block_eps}),
        ({"family": "olmo2"}, {"q_whole_norm.weight": block_eps / 4}),
        ({"attention_sink": True, "value_residual": True}, {"sinks": block_eps / 4, "value_mix": block_eps}),
        ({"mlp": "xielu", "mlp_input_scale": 1.0}, {"alpha_p": block_eps, "input_scale": block_eps}),
        ({"family": "sas"}, {"shape_gains": block_eps / 4}),
    ):
        rows = parameter_table(make_config(**shape), rule, BASE)
        for suffix, factor in eps.items():
            found = [row for row in rows if row.name.endswith(suffix)]
            assert found
            for row in found:
                expected = (BASE.lr * block_lr, 0.0, BASE.eps * factor)
                assert (row.lr, row.weight_decay, row.eps) == pytest.approx(expected, rel=1e-12), row.name
    for shape, name, factor in (
        ({"family": "sas"}, "input_layernorm.weight", 1 / 4),
        ({"family": "sas", "norm": "layernorm", "norm_bias": True}, "input_layernorm.bias", 1 / 4),
        ({"family": "sas", "norm": "single_scale_rmsnorm"}, "input_layernorm.scale", 1.0),
    ):
        (row,) = (row for row in parameter_table(make_config(**shape), rule, BASE) if row.name.endswith(f"2.{name}"))
        expected = (BASE.lr / 3, 0.0, BASE.eps * factor)  # on the stream, whose gains multiply over the blocks
        assert (row.lr, row.weight_decay, row.eps) == pytest.approx(expected, rel=1e-12), row.name
    rows = parameter_table(make_config(attention="pruned", pruning_rank=8), rule, BASE)
    asked = {row.name.split(".")[-2]: row for row in rows if row.name.startswith("model.layers.2.self_attn.")}
    assert asked["self_attn"].eps == pytest.approx(BASE.eps * block_eps), "keep_bias is one number"
    for name in ("ask_proj", "offer_proj"):  # of a rank that does not grow
        assert asked[name].lr == pytest.approx(BASE.lr * block_lr / 4)
        assert asked[name].eps == pytest.approx(BASE.eps * block_eps)
    rows = parameter_table(make_config(norm="single_scale_rmsnorm", embedding_projection=True), rule, BASE)
    outer = {row.name: (row.lr, row.weight_decay, row.eps) for row in rows if "layers" not in row.name}
    assert outer["model.norm.scale"] == pytest.approx((BASE.lr, 0.0, BASE.eps))
    for name in ("model.embed_projection.weight", "model.output_projection.weight"):
        assert outer[name] == pytest.approx((BASE.lr / 4, BASE.weight_decay * 4, BASE.eps / 4))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"attention": "shaped", "sliding_window": 4}, "sliding_window = 4 does not fit, set it to None"),
        ({"attention": "shaped", "attention_sink": True}, "attention_sink = True does not fit, set it to False"),
        ({"family": "mixit", "qk_norm": "head"}, "attention = mixing has neither queries nor keys"),
        (
            {"family": "mixit", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "attention = mixing has neither queries nor keys: rope_scaling = .* does not fit, set it to None",
        ),
        ({"family": "mixit", "rope_theta": 5e5}, "rope_theta = 500000.0 does not fit, set it to 10000.0"),
        ({"rope_theta": 1.0}, "rope_theta\n  Input should be greater than 1"),
        (
            {"family": "gpt2", "rope_theta": 5e5},
            r"rope_theta = 500000 needs position_embedding: rope \(it is learned\)",
        ),
        ({"block": "pre_nrom"}, "block = pre_nrom: there is none of that name; did you mean pre_norm"),
        ({"attention": "x"}, f"attention = x: .* it is one of {', '.join(ATTENTIONS)}"),
        ({"block": "skipless"}, "attention = softmax does not fit, set it to shaped"),
        (
            {"family": "sas", "num_key_value_heads": 2},
            r"key_value_heads \(2\) must equal num_attention_heads \(4\)",
        ),
        ({"family": "sas", "head_dim": 16}, r"num_attention_heads x head_dim \(64\) must equal hidden_size \(32\)"),
        ({"block": "post_norm", "branch_gain": "scalar"}, "has the branch gain in its norm: branch_gain = scalar"),
        ({"block": "post_norm", "parallel": True}, "block = post_norm has no norm .*: parallel = True does not fit"),
        ({"shaped_temperature": 1.0}, r"shaped_temperature = 1.0 belongs to attention: shaped, .* softmax; remove it"),
        ({"pruning_rank": 7}, r"pruning_rank = 7 belongs to attention: pruned, and it is softmax; remove it"),
        ({"qk_norm": "none", "qk_norm_frozen": True}, "qk_norm_frozen and qk_norm_init need qk_norm"),
        ({"norm": "single_scale_rmsnorm", "norm_bias": True}, "norm_bias = true needs norm: layernorm"),
    ],
)
def test_switches_that_exclude_each_other_are_refused(
    make_config: MakeConfig, shape: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**shape)


def test_queries_that_stay_at_zero_get_a_warning(make_config: MakeConfig) -> None:
    assert cautions(make_config(family="sas")) == []
    assert cautions(make_config(family="sas", shaped_gains="fixed", frozen_qk=True)) == []
    for wiring in ({"family": "sas"}, {"attention": "shaped", "shaped_gains": "learned"}):
        (caution,) = cautions(make_config(**wiring, frozen_qk=True))
        assert "queries start at zero and stay there" in caution


def test_unregulated_logits_without_norms_get_a_warning(make_config: MakeConfig) -> None:
    assert cautions(make_config(family="outlier_protected")) == []
    assert cautions(make_config(family="outlier_protected", qk_norm="none", attn_logit_softcapping=30.0)) == []
    (caution,) = cautions(make_config(family="outlier_protected", qk_norm="none"))
    assert "model.block = norm_free without model.qk_norm" in caution


def test_hooks_find_the_branches_of_every_block(make_config: MakeConfig) -> None:
    """Diagnostics and quantization look modules up by these names."""
    for shape in SHAPES:
        for layer in started(make_config(**shape)).model.layers:
            assert isinstance(layer.get_submodule("self_attn"), nn.Module)
            assert isinstance(layer.get_submodule("mlp.down_proj"), nn.Linear)
