"""Caps, sinks, gates, value residuals, shaped and mixing maps, each against the map written out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from plumbline.model.attention import attention_kind
from plumbline.model.attention.context import AttentionContext, attention_context
from plumbline.model.attention.mixing import MixingAttention, draw_mixing
from plumbline.model.attention.shaped import ShapedAttention
from plumbline.model.attention.softmax import SoftmaxAttention
from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.parameterization.config import OptimizerSettings, ParameterizationConfig
from plumbline.model.parameterization.initialization import initialize
from plumbline.model.parameterization.multipliers import Multipliers, multipliers
from plumbline.model.parameterization.table import parameter_table

MakeConfig = Callable[..., ModelConfig]
Enliven = Callable[..., None]
Prepared = tuple[Any, Tensor, AttentionContext, Tensor, Tensor]

LENGTH = 12


@pytest.fixture
def prepare(make_config: MakeConfig, enliven: Enliven) -> Callable[..., Prepared]:
    """Return a layer, an input, its context, its logits [B, H, T, T] before masking, its values [B, H, T, head_dim]."""

    @torch.no_grad()
    def build(layer: int = 1, **shape: Any) -> Prepared:
        config = make_config(**shape)
        module = attention_kind(config)(config, Multipliers(attention=0.9), layer)
        enliven(module)
        x = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(3))
        context = attention_context(config, torch.arange(LENGTH)[None], 0, None, x.dtype)
        assert isinstance(module, SoftmaxAttention)
        query, key = module.queries_and_keys(x, context)
        groups = config.num_attention_heads // config.num_key_value_heads
        value = module.values(x).repeat_interleave(groups, dim=1)
        return module, x, context, 0.9 * query @ key.repeat_interleave(groups, dim=1).transpose(-1, -2), value

    return build


CAUSAL = torch.ones(LENGTH, LENGTH).tril().bool()


@torch.no_grad()
def test_a_cap_bounds_the_logits(prepare: Callable[..., Prepared]) -> None:
    module, x, context, logits, value = prepare(attn_logit_softcapping=1.5, num_key_value_heads=2)
    weights = (1.5 * torch.tanh(logits / 1.5)).masked_fill(~CAUSAL, -torch.inf).softmax(-1)
    torch.testing.assert_close(module(x, context), module.o_proj((weights @ value).transpose(1, 2).flatten(2)))
    assert logits.abs().max() > 1.5


@torch.no_grad()
def test_a_sink_takes_its_share_of_the_softmax(prepare: Callable[..., Prepared]) -> None:
    module, x, context, logits, value = prepare(attention_sink=True, sliding_window=5)
    module.sinks.copy_(torch.tensor([0.0, 1.0, 2.0, -30.0]))
    allowed = CAUSAL & ~CAUSAL.tril(-5)
    exponentials = logits.exp() * allowed
    weights = exponentials / (exponentials.sum(-1, keepdim=True) + module.sinks.exp()[:, None, None])
    assert weights.sum(-1)[:, 2].mean() < 0.8
    torch.testing.assert_close(weights.sum(-1)[:, 3], torch.ones(2, LENGTH))
    torch.testing.assert_close(module(x, context), module.o_proj((weights @ value).transpose(1, 2).flatten(2)))


@torch.no_grad()
def test_the_written_out_map_without_cap_and_sink_is_the_kernel_s(prepare: Callable[..., Prepared]) -> None:
    module, x, context, _, _ = prepare(num_key_value_heads=2)
    expected = module(x, context)
    module.cap = 1e6
    torch.testing.assert_close(module(x, context), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["head", "elementwise"])
@torch.no_grad()
def test_a_gate_multiplies_heads_or_elements(prepare: Callable[..., Prepared], kind: str) -> None:
    module, x, context, logits, value = prepare(attention_gate=kind)
    gate = torch.sigmoid(x @ module.g_proj.weight.T)
    mixed = (logits.masked_fill(~CAUSAL, -torch.inf).softmax(-1) @ value).transpose(1, 2).flatten(2)
    if kind == "head":
        assert gate.size(-1) == 4
        gate = gate.repeat_interleave(8, dim=-1)
    torch.testing.assert_close(module(x, context), module.o_proj(mixed * gate))


@torch.no_grad()
def test_values_are_mixed_with_the_first_block_s(make_config: MakeConfig, enliven: Enliven) -> None:
    config = make_config(value_residual=True, block="post_norm", embedding_projection=True)
    model = CausalLM(config, Multipliers(attention=0.3)).eval()
    enliven(model)
    ids = torch.arange(LENGTH)[None]
    seen: list[Tensor] = []
    attentions: list[Any] = [layer.self_attn for layer in model.model.layers]
    for attention in attentions:
        attention.register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0]))
    found: list[Tensor] = []
    attentions[2].o_proj.register_forward_pre_hook(lambda _m, inputs: found.append(inputs[0]))
    model(ids)
    assert attentions[0].value_mix is None
    first, own = attentions[0].values(seen[0]), attentions[2].values(seen[2])
    a, b = attentions[2].value_mix
    context = attention_context(config, torch.arange(LENGTH)[None], 0, None, torch.float32)
    query, key = attentions[2].queries_and_keys(seen[2], context)
    expected = attentions[2].attend(query, key, a * own + b * first, context)
    torch.testing.assert_close(found[0], expected.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("gains", ["fixed", "learned"])
@torch.no_grad()
def test_the_shaped_map_is_identity_plus_centred_softmax(prepare: Callable[..., Prepared], gains: str) -> None:
    module, x, context, logits, value = prepare(attention="shaped", shaped_gains=gains, num_key_value_heads=2)
    assert isinstance(module, ShapedAttention)
    a, b, g = torch.ones(3, 4) if module.shape_gains is None else module.shape_gains
    uniform = CAUSAL / CAUSAL.sum(-1, keepdim=True)
    softmax = logits.masked_fill(~CAUSAL, -torch.inf).softmax(-1)
    parts = (torch.eye(LENGTH), softmax, uniform)
    weights = sum(gain[:, None, None] * part for gain, part in zip((a, b, -g), parts, strict=True))
    torch.testing.assert_close(module(x, context), module.o_proj((weights @ value).transpose(1, 2).flatten(2)))


def test_the_shaped_temperature_is_of_the_root_of_the_base_width(make_config: MakeConfig) -> None:
    rule = ParameterizationConfig(rule="sp")
    plain = multipliers(make_config(attention="shaped"), rule).attention
    shaped = multipliers(make_config(attention="shaped", shaped_temperature=2.0), rule).attention
    assert shaped == pytest.approx(plain / (2 * 32**0.5))
    scaled = ParameterizationConfig(rule="completep", base_hidden_size=8, base_num_hidden_layers=1)
    plain = multipliers(make_config(attention="shaped"), scaled).attention
    shaped = multipliers(make_config(attention="shaped", shaped_temperature=2.0), scaled).attention
    assert shaped == pytest.approx(plain / (2 * 8**0.5)), "that of the base"


def test_mixing_matrices_have_rows_that_sum_to_one(make_config: MakeConfig) -> None:
    matrices = draw_mixing((3, 40, 40), 0.05, torch.Generator().manual_seed(0))
    torch.testing.assert_close(matrices.sum(-1), torch.ones(3, 40))
    assert matrices.triu(1).abs().max() == 0
    torch.testing.assert_close(matrices[0, 5, :6], torch.tensor([0.5, 0, 0, 0, 0, 0.5]))
    assert matrices[0, 0, 0] == 1
    for head in matrices[1:]:
        noise = head[20:] - torch.eye(40)[20:]
        spread = (noise.square().sum(-1) / torch.arange(20, 40)).sqrt()  # one degree of freedom is lost to the mean
        assert 0.05 * 0.8 < spread.mean() < 40**-0.5 * 1.2
    assert not torch.equal(matrices[1], matrices[2])


@torch.no_grad()
def test_mixing_looks_at_no_token_and_is_stored(make_config: MakeConfig) -> None:
    config = make_config(family="mixit", num_key_value_heads=2)
    rule = ParameterizationConfig(rule="sp")
    rows = parameter_table(config, rule, OptimizerSettings(lr=0.01, weight_decay=0.0, eps=1e-8))
    models = [CausalLM(config, multipliers(config, rule)).eval() for _ in range(2)]
    initialize(models[0], rows, seed=1)
    initialize(models[1], rows, seed=2)
    ids = torch.arange(LENGTH)[None]
    assert not torch.equal(models[0](ids), models[1](ids))
    models[1].load_state_dict(models[0].state_dict())
    assert torch.equal(models[0](ids), models[1](ids))
    module = models[0].model.layers[1].self_attn
    assert isinstance(module, MixingAttention)
    x = torch.randn(1, LENGTH, 32)
    values = module.v_proj(x).unflatten(-1, (2, 8)).transpose(1, 2).repeat_interleave(2, dim=1)
    mixed = module.mixing[:, :LENGTH, :LENGTH] @ values
    context = attention_context(config, torch.arange(LENGTH)[None], 0, None, torch.float32)
    torch.testing.assert_close(module(x, context), module.o_proj(mixed.transpose(1, 2).flatten(2)))
