"""What the parameterization does to training: nothing at the base, and away from it what the theory says."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.families import FAMILIES
from plumbline.model.parameterization.config import OptimizerSettings, ParameterizationConfig
from plumbline.model.parameterization.initialization import initialize
from plumbline.model.parameterization.multipliers import multipliers
from plumbline.model.parameterization.rows import ParameterRow
from plumbline.model.parameterization.table import parameter_table

MakeConfig = Callable[..., ModelConfig]
MakeModel = Callable[..., CausalLM]
Loss = Callable[[CausalLM], Tensor]

RULES: list[dict[str, Any]] = [
    {"rule": "sp"},
    {"rule": "mup"},
    {"rule": "depth_alpha", "depth_alpha": 0.5},
    {"rule": "depth_alpha", "depth_alpha": 2.0},
    {"rule": "completep"},
]


def build(
    config: ModelConfig, rule: ParameterizationConfig, base: OptimizerSettings, seed: int = 0
) -> tuple[CausalLM, list[ParameterRow]]:
    """Return an initialised model with its table."""
    rows = parameter_table(config, rule, base)
    model = CausalLM(config, multipliers(config, rule))
    initialize(model, rows, seed)
    return model, rows


def adam(model: CausalLM, rows: list[ParameterRow]) -> torch.optim.AdamW:
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [parameters[row.name]], "lr": row.lr, "weight_decay": row.weight_decay, "eps": row.eps}
        for row in rows
        if row.trainable
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def train(model: CausalLM, optimizer: torch.optim.Optimizer, loss: Loss, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()


def batch(config: ModelConfig, rows: int = 2, length: int = 16) -> Tensor:
    return torch.randint(config.vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(1))


def mean_loss(tokens: Tensor) -> Loss:
    def loss(model: CausalLM) -> Tensor:
        total: Tensor = model(tokens[:, :-1], labels=tokens[:, 1:])[0]
        return total / tokens[:, 1:].numel()

    return loss


@pytest.mark.parametrize("family", FAMILIES)
def test_all_rules_train_the_same_model_at_the_base(make_config: MakeConfig, family: str) -> None:
    config = make_config(family=family)
    loss = mean_loss(batch(config))
    base = OptimizerSettings(lr=0.01, weight_decay=0.1, eps=1e-6)
    results = []
    for values in RULES:
        rule = ParameterizationConfig.model_validate(
            {"base_hidden_size": 32, "base_num_hidden_layers": 3, "base_head_dim": 8, **values}
        )
        model, rows = build(config, rule, base)
        initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        train(model, adam(model, rows), loss, steps=10)
        final = {name: parameter.detach() for name, parameter in model.named_parameters()}
        results.append((rows, initial, final))
    first_rows, first_initial, first_final = results[0]
    for rows, initial, final in results[1:]:
        assert rows == first_rows
        assert all(torch.equal(initial[name], first_initial[name]) for name in initial)
        assert all(torch.equal(final[name], first_final[name]) for name in final)
    moved = {name for name in first_final if not torch.equal(first_initial[name], first_final[name])}
    assert moved == {row.name for row in first_rows if row.trainable}


def test_branches_are_multiplied_after_their_bias(make_model: MakeModel) -> None:
    model = make_model(family="llama", attention_bias=True, mlp_bias=True)
    block: nn.Module = model.model.layers[0]
    biases = {name: p for name, p in block.named_parameters() if name.endswith(("o_proj.bias", "down_proj.bias"))}
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if name not in biases and "layernorm" not in name:
                parameter.zero_()
    x = torch.randn(1, 5, 32)
    streams: list[Tensor] = []
    block.register_forward_hook(lambda _m, inputs, output: streams.extend((inputs[0], output)))
    model(torch.arange(5)[None])
    x, y = streams
    assert len(biases) == 2
    torch.testing.assert_close(y - x, sum(biases.values()).expand_as(x) / 3)  # type: ignore[union-attr]


def test_multipliers_reach_logits_and_loss_alike(make_model: MakeModel) -> None:
    model = make_model(final_logit_softcapping=4.0)
    tokens = batch(model.config)
    streams: list[Tensor] = []
    model.model.layers[0].register_forward_hook(lambda _m, inputs, _o: streams.append(inputs[0]))
    hidden = model.model(tokens[:, :-1])
    torch.testing.assert_close(streams[0], 1.7 * model.model.embed_tokens.weight[tokens[:, :-1]])
    logits = model(tokens[:, :-1])
    torch.testing.assert_close(logits, 4 * torch.tanh(2.3 / 4 * hidden @ model.lm_head.weight.T / 4))
    assert logits.dtype == torch.float32
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    loss, cross_entropy = model(tokens[:, :-1], labels=tokens[:, 1:])
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(cross_entropy, expected)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
@torch.no_grad()
def test_a_skip_gain_leaves_as_much_of_the_embedding_at_any_depth(make_config: MakeConfig, alpha: float) -> None:
    """Of the shaped family, whose blocks halve the power of the stream: 2^-L would be left, 2e-10 at depth 32."""
    left, sizes = [], []
    for depth in (2, 8, 32):
        config = make_config(family="shaped", num_hidden_layers=depth, final_norm=False)
        values = {"rule": "depth_alpha", "depth_alpha": alpha, "base_hidden_size": 32, "base_num_hidden_layers": 2}
        model, _ = build(config, ParameterizationConfig.model_validate(values), OptimizerSettings(0.01, 0.1, 1e-8))
        tokens = batch(config)
        sizes.append(model.model(tokens).square().mean().sqrt().item())
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        embedded = model.model.embed_tokens(tokens)
        left.append((model.model(tokens).norm() / embedded.norm()).item())
    assert left == pytest.approx([1 / 4] * 3, rel=1e-5), "two blocks of two branches, sqrt(1/2) each"
    assert sizes == pytest.approx([sizes[0]] * 3, rel=0.5), "nor does the stream vanish with its branches"


def gradient_norms(config: ModelConfig, rule: ParameterizationConfig) -> dict[str, tuple[float, float]]:
    """Return role -> norm of its gradients after three steps, expected growth over the base."""
    tokens = batch(config, rows=8, length=32)
    model, rows = build(config, rule, OptimizerSettings(lr=3e-3, weight_decay=0.0, eps=1e-12))
    train(model, adam(model, rows), mean_loss(tokens), steps=3)
    model.zero_grad()
    mean_loss(tokens)(model).backward()
    squares: dict[str, tuple[float, float]] = {}
    for row in rows:
        gradient = model.get_parameter(row.name).grad
        assert gradient is not None
        before, _ = squares.get(row.role, (0.0, 0.0))
        squares[row.role] = (before + gradient.square().sum().item(), row.gradient_growth)
    return {role: (math.sqrt(square), growth) for role, (square, growth) in squares.items()}


@pytest.mark.parametrize("direction", ["width", "depth"])
def test_gradients_grow_as_the_table_expects(make_config: MakeConfig, direction: str) -> None:
    """At eight times the base: 1 or 8^-1/2, by role and direction, where the embedding outweighs the first branches."""
    values = {"base_hidden_size": 32, "base_num_hidden_layers": 2, "embedding_multiplier": 10.0}
    norms = []
    for factor in (1, 8):
        width, depth = (32 * factor, 2) if direction == "width" else (32, 2 * factor)
        shape = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": width // 8, "head_dim": 8}
        norms.append(gradient_norms(make_config(**shape), ParameterizationConfig.model_validate(values)))
    base, grown = norms
    assert {growth for _, growth in base.values()} == {1.0}
    for role in ("embedding", "unembedding", "hidden_matrix", "hidden_norm", "final_norm"):
        found, expected = grown[role][0] / base[role][0], grown[role][1]
        assert expected == pytest.approx(1.0) or expected == pytest.approx(8**-0.5)
        assert found == pytest.approx(expected, rel=0.3), role


def test_the_value_projection_of_a_skipless_model_does_not_scale_with_depth(make_config: MakeConfig) -> None:
    """The first block alone has it, and the whole stream passes through it."""
    config = make_config(family="sas", num_hidden_layers=16)
    values = {"rule": "depth_alpha", "depth_alpha": 0.5, "base_hidden_size": 32, "base_num_hidden_layers": 2}
    rule, base = ParameterizationConfig.model_validate(values), OptimizerSettings(3e-3, 0.1, 1e-12)
    places = {"values": "model.layers.0.self_attn.v_proj.weight", "keys": "model.layers.0.self_attn.k_proj.weight"}
    deep, shallow = (
        {row.name: row for row in parameter_table(model, rule, base)}
        for model in (config, config.model_copy(update={"num_hidden_layers": 2}))
    )
    assert deep[places["values"]] == shallow[places["values"]]
    assert deep[places["keys"]].lr == pytest.approx(8**-0.5 * shallow[places["keys"]].lr)
    norms = []
    for depth in (2, 16):
        model, rows = build(config.model_copy(update={"num_hidden_layers": depth}), rule, base)
        loss = mean_loss(batch(config, rows=8, length=32))
        train(model, adam(model, rows), loss, steps=3)
        model.zero_grad()
        loss(model).backward()
        gradient = model.get_parameter(places["values"]).grad
        assert gradient is not None
        norms.append(gradient.norm().item())
    assert norms[1] / norms[0] == pytest.approx(1, rel=0.5), "8^-1/2 if it were a branch"


def test_features_move_in_proportion_to_gamma_0(make_config: MakeConfig) -> None:
    config = make_config(hidden_size=64, num_attention_heads=2, num_hidden_layers=2)
    tokens = batch(config)
    # A loss linear in the logits, so that every gradient is exactly 1/gamma_0 of what it is at gamma_0 = 1; an eps as
    # large as the gradients, so that leaving it unscaled would show
    direction = torch.randn(*tokens.shape, config.vocab_size, generator=torch.Generator().manual_seed(2))

    def linear(model: CausalLM) -> Tensor:
        logits: Tensor = model(tokens)
        return (logits * direction).mean()

    changes, features, outputs = {}, {}, {}
    for gamma in (1.0, 1 / 16, 1 / 64):
        rule = ParameterizationConfig(rule="sp", gamma_0=gamma)
        model, rows = build(config, rule, OptimizerSettings(lr=2e-3, weight_decay=0.0, eps=1e-5))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        hidden, logits = model.model(tokens).detach(), model(tokens).detach()
        train(model, adam(model, rows), linear, steps=1)
        changes[gamma] = torch.cat(
            [(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)]
        )
        features[gamma] = (model.model(tokens) - hidden).norm().item()
        outputs[gamma] = (model(tokens) - logits).norm().item()
    for gamma in (1 / 16, 1 / 64):
        difference = changes[gamma] / gamma - changes[1.0]
        assert difference.norm() < 1e-3 * changes[1.0].norm()
    assert features[1 / 16] / features[1 / 64] == pytest.approx(4, rel=0.1)
    assert outputs[1 / 16] / outputs[1 / 64] == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("eps", [1e-12, 1e-3])
def test_the_absorbed_form_trains_the_same_model(make_config: MakeConfig, eps: float) -> None:
    config = make_config()
    tokens = batch(config, rows=4)
    logits = []
    for form in ("forward", "absorbed"):
        rule = ParameterizationConfig.model_validate(
            {"rule": "completep", "base_hidden_size": 8, "base_num_hidden_layers": 1, "output_scaling": form}
        )
        model, rows = build(config, rule, OptimizerSettings(lr=0.01, weight_decay=0.1, eps=eps))
        train(model, adam(model, rows), mean_loss(batch(config)), steps=8)
        logits.append(model(tokens).detach())
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-4)


def test_initial_weights_are_forgotten_at_the_same_pace_at_every_width(make_config: MakeConfig) -> None:
    """Over 200 steps of lr * weight_decay = 1/200, decay leaves 1/e of W_0 in W_t, whatever the width.

    No coordinate check sees weight decay. Without its factor m_N, the wide model would keep exp(-1/4) = 0.78 of W_0.
    """
    rule = ParameterizationConfig(rule="mup", base_hidden_size=32)
    left = []
    for width in (32, 128):
        config = make_config(hidden_size=width, num_hidden_layers=1, head_dim=16, num_attention_heads=width // 16)
        model, rows = build(config, rule, OptimizerSettings(lr=0.01, weight_decay=0.5, eps=1e-8))
        initial = {r.name: model.get_parameter(r.name).detach().clone() for r in rows if r.role == "hidden_matrix"}
        optimizer, noise = adam(model, rows), torch.Generator().manual_seed(0)
        for _ in range(200):  # another random text in each step: a gradient that knew the weights would rebuild them
            train(model, optimizer, mean_loss(torch.randint(61, (8, 17), generator=noise)), steps=1)
        shares = [float((model.get_parameter(n).detach() * w).sum() / w.square().sum()) for n, w in initial.items()]
        left.append(sum(shares) / len(shares))
    assert left == pytest.approx([math.exp(-1)] * 2, abs=0.08)
