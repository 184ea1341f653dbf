"""Exports: the stock class computes the trained function, and whatever it cannot express is refused.

The decoders of `make_model` have no multiplier at 1: m_N = 4, m_L = 3, half the usual attention scale, and both tunable
multipliers set.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from launcher.runtime.config import parse_config
from launcher.runtime.hf_export import ExportError, export
from launcher.runtime.loading import LoadedModel, load_model
from model.config import ModelConfig
from model.decoder import CausalLM
from model.export import targets
from model.export.fold import Weights, fold_multipliers
from model.export.targets import to_hugging_face
from model.generation import generate
from model.multipliers import Multipliers

MakeConfig = Callable[..., ModelConfig]
MakeModel = Callable[..., CausalLM]


def loaded(model: CausalLM, folder: Path) -> LoadedModel:
    """What `load_model` would give for a run that trained this decoder."""
    values = {
        "run": {"name": "tiny"},
        "model": model.config.model_dump(),
        "parameterization": {"rule": "completep", "base_hidden_size": 8, "base_num_hidden_layers": 1},
        "data": {
            "train": [{"path": "corpus"}],
            "sequence_length": 16,
            "global_batch_size": 1,
            "micro_batch_size": 1,
        },
        "optimizer": {"lr": 0.01},
        "train": {"steps": 10},
    }
    config = parse_config(values, source="test")
    return LoadedModel(model, folder / "checkpoints" / "step_00000010", None, config, 10, 160)


EXPRESSIBLE = [
    ("auto", "Qwen3ForCausalLM", {"family": "qwen3", "num_key_value_heads": 2}),
    ("auto", "Qwen3ForCausalLM", {"family": "qwen3", "tie_word_embeddings": True, "attention_bias": True}),
    ("qwen3", "Qwen3ForCausalLM", {"family": "qwen3", "head_dim": 10, "sliding_window": 6, "rope_theta": 500.0}),
    ("qwen3", "Qwen3ForCausalLM", {"family": "qwen3", "num_attention_heads": 3, "head_dim": 10}),
    ("auto", "LlamaForCausalLM", {"family": "llama", "attention_bias": True, "mlp_bias": True}),
    ("llama", "LlamaForCausalLM", {"family": "llama", "tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("granite", "GraniteForCausalLM", {"family": "llama", "num_key_value_heads": 2}),
    ("granite", "GraniteForCausalLM", {"family": "llama", "tie_word_embeddings": True, "mlp_bias": True}),
    ("auto", "GPT2LMHeadModel", {"family": "gpt2", "norm_eps": 1e-3}),
    ("gpt2", "GPT2LMHeadModel", {"family": "gpt2", "tie_word_embeddings": False, "mlp": "gelu"}),
    (
        "gpt2",
        "GPT2LMHeadModel",
        {"family": "gpt2", "attention_bias": False, "mlp_bias": False, "norm_bias": False, "intermediate_size": 20},
    ),
]


@pytest.mark.parametrize(("target", "architecture", "shape"), EXPRESSIBLE)
def test_the_stock_class_computes_the_same(
    make_model: MakeModel, tmp_path: Path, target: str, architecture: str, shape: dict[str, Any]
) -> None:
    model = make_model(**shape)
    report = export(loaded(model, tmp_path), tmp_path / "out", target)
    assert (report.architecture, report.greedy_tokens) == (architecture, 32)
    assert report.relative_error <= 1e-5

    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokens = torch.randint(61, (3, 48), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        expected, found = model(tokens), stock(input_ids=tokens).logits
    assert ((found - expected).abs().max() / expected.abs().max()).item() <= 1e-5
    continued = stock.generate(tokens[:1, :8], max_new_tokens=30, do_sample=False, pad_token_id=0)[0, 8:]
    ours = torch.cat(list(generate(model, tokens[:1, :8], 30, temperature=0.0)))
    assert torch.equal(continued, ours)


def test_granite_keeps_the_weights_as_trained(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model(family="llama")
    export(loaded(model, tmp_path), tmp_path / "out", "granite")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    theirs = dict(stock.named_parameters())
    assert all(torch.equal(theirs[name], weight) for name, weight in model.named_parameters())


def test_an_exported_folder_opens_as_a_model_and_is_not_exported_again(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model()
    export(loaded(model, tmp_path), tmp_path / "out", "auto")
    again = load_model(tmp_path / "out", torch.device("cpu"))
    prompt = [1, 2, 3]
    expected = list(loaded(model, tmp_path).continuation(prompt, 10, temperature=0.0))
    assert list(again.continuation(prompt, 10, temperature=0.0)) == expected
    with pytest.raises(ValueError, match="already a Hugging Face folder"):
        export(again, tmp_path / "twice", "auto")


def test_an_output_in_use_is_kept_unless_told_otherwise(make_model: MakeModel, tmp_path: Path) -> None:
    model, output = loaded(make_model(), tmp_path), tmp_path / "out"
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"out: exists; choose another folder or add --overwrite"):
        export(model, output, "auto")
    assert (output / "notes.txt").read_text() == "mine"
    export(model, output, "auto", overwrite=True)
    assert not (output / "notes.txt").exists()
    assert (output / "README.md").read_text().startswith("---\nlibrary_name: transformers")


WRONG: list[dict[str, float]] = [{"residual": 1.0}, {"attention": 8**-0.5}, {"embedding": 1.0}, {"output": 2.3}]


@pytest.mark.parametrize("mistake", WRONG, ids=lambda mistake: next(iter(mistake)))
@pytest.mark.parametrize("shape", [{"family": "qwen3"}, {"family": "gpt2"}], ids=lambda shape: shape["family"])
def test_a_wrong_factor_is_caught_and_leaves_nothing(
    make_model: MakeModel,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    shape: dict[str, str],
    mistake: dict[str, float],
) -> None:
    def forgetful(weights: Weights, config: ModelConfig, multipliers: Multipliers) -> Weights:
        return fold_multipliers(weights, config, replace(multipliers, **mistake))

    monkeypatch.setattr(targets, "fold_multipliers", forgetful)
    with pytest.raises(ExportError, match=r"logits differ by .* nothing was exported"):
        export(loaded(make_model(**shape), tmp_path), tmp_path / "out", "auto")
    assert list(tmp_path.iterdir()) == []


LLAMA: dict[str, Any] = {"family": "llama"}
QWEN3: dict[str, Any] = {"family": "qwen3"}
GPT2: dict[str, Any] = {"family": "gpt2"}
UNCOMMON: dict[str, Any] = {
    "norm": "layernorm",
    "position_embedding": "learned",
    "mlp": "geglu",
    "final_logit_softcapping": 30.0,
}


@pytest.mark.parametrize(
    ("target", "shape", "message"),
    [
        *(
            (target, {**family, key: value}, f"--target {target} has model.{key} = ")
            for target, family in (("llama", LLAMA), ("qwen3", QWEN3), ("granite", LLAMA))
            for key, value in {**UNCOMMON, "qk_norm": "head" if family is LLAMA else "none"}.items()
        ),
        ("qwen3", {**QWEN3, "mlp_bias": True}, "model.mlp_bias = False; this model has True"),
        ("llama", {**LLAMA, "sliding_window": 4}, "model.sliding_window = None; this model has 4"),
        ("granite", {**LLAMA, "sliding_window": 4}, "model.sliding_window = None; this model has 4"),
        ("granite", {**LLAMA, "head_dim": 6}, "model.head_dim = 8; this model has 6"),
        ("gpt2", {**GPT2, "norm": "rmsnorm", "norm_bias": False}, "model.norm = layernorm; this model has rmsnorm"),
        ("gpt2", {**GPT2, "position_embedding": "rope"}, "model.position_embedding = learned; this model has rope"),
        ("gpt2", {**GPT2, "mlp": "relu2"}, "model.mlp = gelu or gelu_tanh; this model has relu2"),
        ("gpt2", {**GPT2, "qk_norm": "head"}, "model.qk_norm = none; this model has head"),
        ("gpt2", {**GPT2, "final_logit_softcapping": 30.0}, "model.final_logit_softcapping = None"),
        ("gpt2", {**GPT2, "sliding_window": 4}, "model.sliding_window = None; this model has 4"),
        ("gpt2", {**GPT2, "num_key_value_heads": 2}, "model.num_key_value_heads = 4; this model has 2"),
        ("gpt2", {**GPT2, "head_dim": 6}, "model.head_dim = 8; this model has 6"),
        *(
            (
                target,
                {**family, "num_attention_heads": 3, "head_dim": 10},
                "this model has 32 and 3: try another target",
            )
            for target, family in (("llama", LLAMA), ("granite", LLAMA), ("gpt2", GPT2))
        ),
        ("auto", {**QWEN3, "norm": "layernorm"}, "--target gpt2 has model.position_embedding = learned"),
        ("mistral", QWEN3, "--target mistral: unknown; known targets: auto, llama, qwen3, gpt2, granite"),
    ],
)
def test_what_a_target_cannot_express_is_refused(
    make_config: MakeConfig, target: str, shape: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match="--target") as caught:
        to_hugging_face(target, make_config(**shape), Multipliers(attention=0.25), {})
    assert message in str(caught.value)
