"""Stock models as ours: the same function under any parameterization, the same weights at its base, clear refusals."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.export.fold import Weights
from plumbline.model.export.from_stock import from_stock, model_section
from plumbline.model.export.targets import to_hugging_face
from plumbline.model.parameterization.config import ParameterizationConfig
from plumbline.model.parameterization.multipliers import Multipliers, multipliers
from tests.model.conftest import SCALINGS, STOCK_SHAPE, scaled, stock_model

Enliven = Callable[..., None]
MakeModel = Callable[..., CausalLM]

TOKENS = torch.randint(53, (2, 33), generator=torch.Generator().manual_seed(0))
GRANITE = {"attention_multiplier": 0.3, "embedding_multiplier": 1.7, "residual_multiplier": 0.6, "logits_scaling": 2.5}
GEMMA = {
    "head_dim": 10,
    "hidden_activation": "gelu",
    "query_pre_attn_scalar": 7,
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 5,
}
FULL = {
    "layer_types": ["full_attention"] * 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0},
    "partial_rotary_factor": 1.0,
}
SOURCES: list[dict[str, Any]] = [
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-4},
    {"model_type": "llama", "tie_word_embeddings": True, "hidden_act": "gelu"},
    {"model_type": "qwen3", "head_dim": 10, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    {"model_type": "qwen3", "head_dim": 6, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    {"model_type": "llama", "rope_parameters": SCALINGS["llama3"], "head_dim": 16},
    {"model_type": "qwen3", "rope_parameters": SCALINGS["yarn"], "head_dim": 16},
    {"model_type": "granite", **GRANITE, "rope_parameters": SCALINGS["linear"]},
    {"model_type": "granite", **GRANITE, "tie_word_embeddings": True},
    {"model_type": "granite", **GRANITE, "mlp_bias": True},
    {"model_type": "arcee", "hidden_act": "relu2", "mlp_bias": True, "head_dim": 10},
    {"model_type": "apertus", "hidden_act": "xielu"},
    {"model_type": "apertus", "hidden_act": "gelu", "attention_bias": True, "tie_word_embeddings": True},
    {"model_type": "olmo2", "rope_parameters": SCALINGS["yarn"]},
    {"model_type": "olmo2", "attention_bias": True, "tie_word_embeddings": True},
    {"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 2},
    {"model_type": "exaone4", "sliding_window": 5, "layer_types": ["sliding_attention"] * 2},
    {"model_type": "cohere", "logit_scale": 0.3, "attention_bias": True},
    {"model_type": "cohere", "logit_scale": 0.3, "tie_word_embeddings": False},
    {"model_type": "gemma2", **GEMMA, "attn_logit_softcapping": 2.0, "tie_word_embeddings": False},
    {"model_type": "gemma2", **GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": 3.0},
    {"model_type": "gemma3_text", **GEMMA, "rope_parameters": {"sliding_attention": SCALINGS["linear"]}},
    {"model_type": "qwen3_5_text", **FULL, "head_dim": 10, "attention_bias": True},
    {"model_type": "qwen3_5_text", **FULL, "head_dim": 16, "tie_word_embeddings": True},
    {"model_type": "gpt2"},
    {"model_type": "gpt2", "n_inner": 40, "tie_word_embeddings": False, "activation_function": "gelu"},
]
SCALED = {
    "rule": "completep",
    "base_hidden_size": 8,
    "base_num_hidden_layers": 1,
    "base_head_dim": 2,
    "embedding_multiplier": 1.3,
    "output_multiplier": 2.3,
    "gamma_0": 0.7,
}


def taken_over(stock: Any, rule: dict[str, Any]) -> tuple[CausalLM, Weights]:
    """Our model of the weights, and the weights."""
    entries = stock.config.to_dict()
    config = ModelConfig.model_validate(model_section(entries))
    applied = multipliers(config, ParameterizationConfig.model_validate(rule))
    model = CausalLM(config, applied).eval()
    weights = from_stock(entries, stock.state_dict(), config, applied)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    assert config.tie_word_embeddings == stock.config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    return model, weights


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source["model_type"])
@pytest.mark.parametrize("rule", [SCALED, {"rule": "sp"}], ids=lambda rule: rule["rule"])
@torch.no_grad()
def test_our_model_computes_what_the_stock_class_computes(
    enliven: Enliven, source: dict[str, Any], rule: dict[str, Any]
) -> None:
    stock = stock_model(source, enliven)
    model, _ = taken_over(stock, rule)
    expected: Tensor = stock(input_ids=TOKENS).logits
    found = model(TOKENS)
    assert ((found - expected).abs().max() / expected.abs().max()).item() <= 1e-5


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_at_the_base_the_weights_are_the_stock_ones(enliven: Enliven, model_type: str) -> None:
    stock = stock_model({"model_type": model_type, "head_dim": 6}, enliven)
    base = {"rule": "completep", "base_hidden_size": 24, "base_num_hidden_layers": 2}
    theirs = stock.state_dict()
    _, weights = taken_over(stock, base)
    assert all(torch.equal(weight, theirs[name]) for name, weight in weights.items())


@pytest.mark.parametrize(
    ("model_type", "constants"),
    [
        ("gpt2", {"h.0.attn.bias": torch.ones(1, 1, 40, 40), "h.1.attn.masked_bias": torch.tensor(-1e4)}),
        ("llama", {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(3)}),
    ],
)
def test_older_files_store_constants_and_those_of_gpt2_have_no_prefix(
    enliven: Enliven, model_type: str, constants: Weights
) -> None:
    stock = stock_model({"model_type": model_type}, enliven)
    entries = stock.config.to_dict()
    config = ModelConfig.model_validate(model_section(entries))
    usual = Multipliers(attention=config.head_dim**-0.5)
    old = {name.removeprefix("transformer."): weight for name, weight in stock.state_dict().items()}
    found, expected = (
        from_stock(entries, {**old, **constants}, config, usual),
        from_stock(entries, stock.state_dict(), config, usual),
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
HALF_ROTARY = {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}
DEEPSEEK = {**SCALINGS["yarn"], "mscale": 0.7, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"model_type": "mistral"}, "model_type = mistral: only llama, qwen3, .* gpt2, plumbline can be taken"),
        ({"model_type": "llama", "rope_parameters": ROPE}, "rope_type = dynamic: this decoder has plain rotary"),
        (
            {"model_type": "llama", "rope_parameters": DEEPSEEK},
            "mscale, mscale_all_dim of rope_type yarn are not known",
        ),
        ({"model_type": "llama", "hidden_act": "relu"}, "hidden_act = relu: only silu, gelu"),
        ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 1}, "layer_types: this decoder has"),
        ({"model_type": "cohere", "use_qk_norm": True}, "use_qk_norm = True: only False can be taken over"),
        ({"model_type": "exaone4", "sliding_window": 5, **FULL}, "sliding_window = 5: only None can be taken over"),
        ({"model_type": "gemma2"}, "hidden_act = gelu_pytorch_tanh: only silu, gelu can be taken over"),
        (
            {"model_type": "gemma3_text", **GEMMA, "use_bidirectional_attention": True},
            "use_bidirectional_attention = T",
        ),
        (
            {"model_type": "qwen3_5_text", **FULL, "rope_parameters": HALF_ROTARY},
            "partial_rotary_factor = 0.5: only 1.0 can be taken over",
        ),
        (
            {"model_type": "qwen3_5_text", **FULL, "layer_types": ["linear_attention"] * 2},
            "layer_types = {'linear_attention'}: only {'full_attention'} can be taken over",
        ),
        ({"model_type": "gpt2", "activation_function": "relu"}, "activation_function = relu: only gelu, gelu_new"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: only"),
        (
            {"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}},
            "the model is quantized .*: start from the one that it was made of",
        ),
    ],
)
def test_what_our_decoder_lacks_is_refused(source: dict[str, Any], message: str) -> None:
    entries = AutoConfig.for_model(**copy.deepcopy({**STOCK_SHAPE, **source})).to_dict()
    with pytest.raises(ValueError, match=message):
        model_section(entries)


def test_a_gpt2_of_more_blocks_than_it_says_is_refused(enliven: Enliven) -> None:
    stock = stock_model({"model_type": "gpt2"}, enliven)
    entries = {**stock.config.to_dict(), "n_layer": 1}
    config = ModelConfig.model_validate(model_section(entries))
    with pytest.raises(ValueError, match=r"n_layer = 1, and the files hold h\.1\.attn\.c_attn\.bias as well"):
        from_stock(entries, stock.state_dict(), config, Multipliers(attention=config.head_dim**-0.5))


def test_heads_of_no_width_are_not_taken_for_the_usual_ones() -> None:
    entries = AutoConfig.for_model(**copy.deepcopy({**STOCK_SHAPE, "model_type": "qwen3", "head_dim": 0})).to_dict()
    assert model_section(entries)["head_dim"] == 0, "ModelConfig refuses it"


@pytest.mark.parametrize(
    "shape",
    [
        {"family": "outlier_protected", "branch_gain": "vector", "mlp_input_scale": 1.0},
        {"family": "fog", "num_key_value_heads": 2},
        {"family": "sas", "parallel": True},
        {"attention_sink": True, "sliding_window": 6, "num_key_value_heads": 2},
        {"position_embedding": "learned", "mlp": "gelu_tanh", "norm": "layernorm", "norm_bias": True},
    ],
)
@torch.no_grad()
def test_a_folder_of_our_own_code_is_taken_over(make_model: MakeModel, shape: dict[str, Any]) -> None:
    ours = make_model(**shape)
    entries, stock = to_hugging_face("native", ours.config, ours.multipliers, dict(ours.named_parameters()))
    config = ModelConfig.model_validate(model_section(entries))
    applied = multipliers(config, ParameterizationConfig.model_validate({**SCALED, "gamma_0": 1.0}))
    model = CausalLM(config, applied).eval()
    weights = from_stock(entries, stock, config, applied)
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])
    expected = ours(TOKENS)
    assert ((model(TOKENS) - expected).abs().max() / expected.abs().max()).item() <= 1e-5


def test_a_folder_of_our_own_code_says_nothing_of_a_scaling(make_model: MakeModel) -> None:
    ours = make_model(**scaled("yarn"), head_dim=8, attention_sink=True)
    entries, _ = to_hugging_face("native", ours.config, ours.multipliers, dict(ours.named_parameters()))
    with pytest.raises(ValueError, match="rope_frequencies: a folder of our own code does not say by which rule"):
        model_section(entries)


@torch.no_grad()
def test_a_skip_gain_that_the_depth_would_change_is_refused(make_model: MakeModel) -> None:
    """No weight can take a factor on the whole stream: it is the folder's own at the depth of the base alone."""
    ours = make_model(skip_gain=0.8)
    entries, stock = to_hugging_face("native", ours.config, ours.multipliers, dict(ours.named_parameters()))
    config = ModelConfig.model_validate(model_section(entries))
    for rule in ({"rule": "sp"}, {**SCALED, "gamma_0": 1.0, "base_num_hidden_layers": 3}):
        model = CausalLM(config, multipliers(config, ParameterizationConfig.model_validate(rule))).eval()
        model.load_state_dict(from_stock(entries, stock, config, model.multipliers))
        torch.testing.assert_close(model(TOKENS), ours(TOKENS), rtol=1e-4, atol=1e-4)
    applied = multipliers(config, ParameterizationConfig.model_validate(SCALED))
    with pytest.raises(ValueError, match=r"skip_gain = 0.928.* set parameterization.base_num_hidden_layers to 3"):
        from_stock(entries, stock, config, applied)
