"""Rotations: orthogonal, folded exactly, refused where they cannot be, and good against outliers."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plumbline.model.decoder import CausalLM
from plumbline.model.quantization.post_training.apply import quantize_model
from plumbline.model.quantization.post_training.hadamard import hadamard, random_rotation, rotate
from plumbline.model.quantization.post_training.recipes import named_recipe
from tests.model.conftest import stock_model

MakeModel = Callable[..., CausalLM]
Enliven = Callable[..., None]


def test_hadamard_matrices_of_many_sizes() -> None:
    known = [1, 2, 4, 8, 12, 16, 20, 24, 40, 44, 48, 64, 80, 96, 160, 384, 768]
    for size in known:
        matrix = hadamard(size)
        assert matrix is not None, size
        assert torch.equal(matrix.abs(), torch.ones(size, size, dtype=torch.float64))
        assert torch.equal(matrix @ matrix.T, size * torch.eye(size, dtype=torch.float64)), size
    assert all(hadamard(size) is None for size in (3, 6, 10, 18, 28, 36, 52))  # 28, 36 and 52 need other constructions


def test_rotations_are_orthogonal_and_spread_one_channel_over_all() -> None:
    turn = random_rotation(48, torch.Generator().manual_seed(0))
    torch.testing.assert_close(turn @ turn.T, torch.eye(48, dtype=torch.float64))
    torch.testing.assert_close(turn.abs(), torch.full((48, 48), 48**-0.5, dtype=torch.float64))
    assert not torch.equal(turn, random_rotation(48, torch.Generator().manual_seed(1)))


def test_a_size_without_a_hadamard_matrix_is_rotated_all_the_same_with_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(random_rotation.__module__), "handlers", [caplog.handler])
    for seed in (0, 1):
        turn = random_rotation(36, torch.Generator().manual_seed(seed))
        torch.testing.assert_close(turn @ turn.T, torch.eye(36, dtype=torch.float64))
    assert {record.getMessage() for record in caplog.records} == {
        "no Hadamard matrix of size 36 is known here: a random rotation takes its place"
    }


def final_logits(model: CausalLM, tokens: Tensor) -> Tensor:
    """Return logits in the precision of the weights, where the head's own are in fp32."""
    with torch.no_grad():
        return model.model(tokens) @ model.lm_head.weight.T  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "shape",
    [
        {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
        {"family": "llama", "tie_word_embeddings": True},
        {"parallel": True, "qk_norm": "projection"},
        {"norm": "single_scale_rmsnorm", "branch_gain": "scalar", "mlp": "gelu"},
        {"position_embedding": "learned", "final_norm": False, "mlp_input_scale": 1.0},
        {"value_residual": True, "attention_gate": "head", "attention_sink": True},
        {"attention_gate": "elementwise"},
        {"attention": "shaped", "shaped_gains": "learned"},
        {"family": "mixit", "num_key_value_heads": 2},
        {"attention": "pruned"},
        {"hidden_size": 40, "num_attention_heads": 2, "skip_gain": 0.9},
    ],
    ids=str,
)
def test_a_rotated_decoder_computes_the_same(
    make_model: MakeModel, calibration_text: list[Tensor], shape: dict[str, Any]
) -> None:
    model = make_model(**shape).double()
    expected = final_logits(model, calibration_text[0])
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    rotate(model)
    close = 1e-6 if shape.get("attention") == "shaped" else 1e-10  # running means of values are in fp32
    torch.testing.assert_close(final_logits(model, calibration_text[0]), expected, rtol=close, atol=close)
    assert not model.config.tie_word_embeddings
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    turned = {
        name for name, weight in model.named_parameters() if name in before and not torch.equal(weight, before[name])
    }
    assert {"model.embed_tokens.weight", "model.layers.0.self_attn.v_proj.weight"} <= turned


@pytest.mark.parametrize(
    "source",
    [
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"model_type": "llama", "tie_word_embeddings": True},
        {"model_type": "qwen3", "head_dim": 12},
        {"model_type": "mistral"},
    ],
    ids=str,
)
def test_a_rotated_stock_model_computes_the_same(
    enliven: Enliven, calibration_text: list[Tensor], source: dict[str, Any], tmp_path: Any
) -> None:
    model = stock_model(source, enliven)
    with torch.no_grad():
        expected = model(calibration_text[0]).logits
        rotate(model)
        torch.testing.assert_close(model(calibration_text[0]).logits, expected, rtol=1e-4, atol=1e-4)
        model.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path)  # untied for good
        torch.testing.assert_close(again(calibration_text[0]).logits, expected, rtol=1e-4, atol=1e-4)


def test_the_values_of_a_head_are_turned_where_nothing_is_in_between(make_model: MakeModel) -> None:
    """A gate on every channel is in between."""
    for gate, turns in (("none", True), ("head", True), ("elementwise", False)):
        model = make_model(attention_gate=gate, num_key_value_heads=2)
        name = "model.layers.1.self_attn.v_proj.weight"
        before = model.get_parameter(name) * model.get_parameter("model.layers.1.input_layernorm.weight")
        rotate(model)
        after = model.get_parameter(name)
        # The turn of the stream leaves the products of rows, which belong to the channels of a head
        assert torch.allclose(after @ after.T, before @ before.T, atol=1e-4) != turns


def test_rotation_evens_out_an_outlier_channel(make_model: MakeModel, calibration_text: list[Tensor]) -> None:
    plain = make_model(hidden_size=64)
    with torch.no_grad():
        plain.model.embed_tokens.weight[:, 5] *= 50.0
    reports = {}
    for name in ("w8a8-dynamic", "w8a8-dynamic-hadamard"):
        reports[name] = quantize_model(copy.deepcopy(plain), named_recipe(name), calibration_text)[0]
    before, after = reports.values()
    assert before.input_kurtosis_channels is not None
    assert after.input_kurtosis_channels is not None
    assert before.input_kurtosis_channels > 20
    assert after.input_kurtosis_channels < 3


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"family": "gpt2"}, "model.norm = layernorm: it has to be rmsnorm or single_scale_rmsnorm"),
        ({"family": "olmo2"}, "model.block = post_norm: it has to be pre_norm"),
        ({"family": "outlier_protected"}, "model.block = norm_free"),
        ({"block": "sandwich_norm"}, "model.block = sandwich_norm"),
        ({"family": "sas"}, "model.block = skipless"),
        ({"branch_gain": "vector"}, "model.branch_gain = vector: it has to be fixed or scalar"),
        ({"embedding_projection": True}, "model.embedding_projection = True: it has to be False"),
        ({"model_type": "gpt2"}, "no rotation is known for GPT2LMHeadModel"),
        ({"model_type": "gemma3_text", "head_dim": 6}, "no rotation is known for Gemma3ForCausalLM"),
    ],
    ids=str,
)
def test_what_cannot_be_rotated_is_refused_untouched(
    make_model: MakeModel, enliven: Enliven, shape: dict[str, Any], message: str
) -> None:
    model: nn.Module = stock_model(shape, enliven) if "model_type" in shape else make_model(**shape)
    before = [weight.clone() for weight in model.parameters()]
    with pytest.raises(ValueError, match=f"recipe rtn-w4-hadamard: .*{message}"):
        quantize_model(model, named_recipe("rtn-w4-hadamard"))
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
