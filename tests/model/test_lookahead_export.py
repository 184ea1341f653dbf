"""Exported thinkers: stock transformers and the folder's own lookahead.py say what the run's thoughts say.

As in test_export.py, no multiplier of the decoders is 1.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from launcher.runtime.hf_export import export
from model.generation import generate
from model.lookahead.generation import Trigger, generate_thinking
from model.objectives import make_objective
from model.objectives.latent_lookahead import LatentLookahead, LatentLookaheadConfig
from model.objectives.objective import TrainedLM
from tests.model.conftest import Enliven, MakeModel, loaded

NEW = 20
PROMPT = torch.randint(61, (1, 5), generator=torch.Generator().manual_seed(2))
HOT = {"temperature": 4.0}
NEVER = Trigger("entropy", 99.0)
MakeThinking = Callable[..., TrainedLM]


@pytest.fixture
def make_thinking(make_model: MakeModel, enliven: Enliven) -> MakeThinking:
    """A decoder whose thoughts matter; keywords are keys of the model, `look` those of the objective."""

    def make(look: dict[str, Any] | None = None, **shape: Any) -> TrainedLM:
        plain = make_model(**shape)
        config = LatentLookaheadConfig.model_validate({"horizon": 3, **(look or {})})
        model = TrainedLM(plain.config, plain.multipliers, make_objective(config, plain.config, plain.multipliers))
        model.load_state_dict(plain.state_dict(), strict=False)
        enliven(model.objective, 1)
        gain = cast(LatentLookahead, model.objective).thinker.gain
        assert gain is not None
        with torch.no_grad():
            gain.mul_(1 / plain.config.initializer_range)  # a state weighs as much as its mark
        return model.eval()

    return make


def folder_code(folder: Path, **options: Any) -> Any:
    """What `from lookahead import Lookahead` gives a user, on the folder's weights."""
    spec = importlib.util.spec_from_file_location("lookahead", folder / "lookahead.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Lookahead.from_pretrained(folder, dtype=torch.float32, **options)


def ours(model: TrainedLM, trigger: Trigger, **options: Any) -> list[int]:
    look = cast(LatentLookahead, model.objective)
    commits, options = look.config.commit == "thoughts", {"temperature": 0.0, **options}
    return [int(x) for x in generate_thinking(model, look.thinker, commits, PROMPT, NEW, trigger, **options)]


def plain_greedy(model: TrainedLM) -> list[int]:
    return [int(x) for x in generate(model, PROMPT, NEW, temperature=0.0)]


OP: dict[str, Any] = {"family": "outlier_protected"}
SANDWICH: dict[str, Any] = {"block": "sandwich_norm", "tie_word_embeddings": True}
FIXED: dict[str, Any] = {"growth": "fixed", "passes": 2}
CAUSAL: dict[str, Any] = {"within": "causal"}
COMMIT: dict[str, Any] = {"commit": "thoughts"}
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("auto", "LlamaForCausalLM", {"family": "llama"}, {}),
    ("auto", "LlamaForCausalLM", {"family": "llama", "tie_word_embeddings": True}, CAUSAL),
    ("auto", "Qwen3ForCausalLM", {"family": "qwen3"}, FIXED),
    ("auto", "Qwen3ForCausalLM", {"tie_word_embeddings": True, "sliding_window": 6}, {**COMMIT, **CAUSAL}),
    ("auto", "Qwen3ForCausalLM", {"embedding_projection": True, "tie_word_embeddings": True}, COMMIT),
    ("granite", "GraniteForCausalLM", {"family": "llama", "num_key_value_heads": 2}, {**COMMIT, **FIXED}),
    ("granite", "GraniteForCausalLM", {"family": "llama", "tie_word_embeddings": True}, {}),
    ("auto", "GPT2LMHeadModel", {"family": "gpt2"}, {**FIXED, **CAUSAL}),
    ("auto", "GPT2LMHeadModel", {"family": "gpt2", "tie_word_embeddings": False}, COMMIT),
    ("auto", "PlumblineForCausalLM", OP, {}),
    ("auto", "PlumblineForCausalLM", {**OP, "tie_word_embeddings": True, "final_norm": True}, {**FIXED, "passes": 1}),
    ("auto", "PlumblineForCausalLM", {"position_embedding": "learned", "embedding_projection": True}, CAUSAL),
    ("auto", "PlumblineForCausalLM", {"attention_sink": True, "sliding_window": 4, "value_residual": True}, COMMIT),
    ("compat", "Qwen3ForCausalLM", OP, {}),
    ("compat", "Qwen3ForCausalLM", {**OP, "tie_word_embeddings": True, "embedding_projection": True}, FIXED),
    ("compat", "Qwen3ForCausalLM", {**OP, "tie_word_embeddings": True, "final_norm": True}, {**CAUSAL, **COMMIT}),
    ("auto", "Gemma2ForCausalLM", {**SANDWICH, "qk_norm": "none", "final_logit_softcapping": 3.0}, {}),
    ("auto", "Gemma3ForCausalLM", {**SANDWICH, "sliding_window": 6}, FIXED),
    ("auto", "Exaone4ForCausalLM", {"family": "fog", "final_norm": True, "mlp": "swiglu", "sliding_window": 6}, COMMIT),
    ("auto", "Qwen3_5ForCausalLM", {"attention_gate": "elementwise"}, CAUSAL),
    ("auto", "CohereForCausalLM", {"parallel": True, "norm": "layernorm", "norm_bias": False, "qk_norm": "none"}, {}),
    ("auto", "Olmo2ForCausalLM", {"family": "olmo2"}, {"horizon": 1}),
    ("auto", "ApertusForCausalLM", {"mlp": "xielu"}, {**FIXED, "horizon": 1}),
    ("auto", "ArceeForCausalLM", {"family": "llama", "mlp": "relu2"}, {}),
]


@pytest.mark.parametrize(("target", "architecture", "shape", "look"), CASES)
def test_the_folder_thinks_as_the_run_does(
    make_thinking: MakeThinking,
    tmp_path: Path,
    target: str,
    architecture: str,
    shape: dict[str, Any],
    look: dict[str, Any],
) -> None:
    model, folder = make_thinking(look, **shape), tmp_path / "out"
    report = export(loaded(model, tmp_path), folder, target)
    assert report.architecture == architecture
    assert report.lookahead is not None
    assert report.lookahead.left_out is None
    assert report.lookahead.greedy_tokens == 32
    theirs = folder_code(folder, trust_remote_code=report.own_code)
    assert list(theirs.continuation(PROMPT, NEW, "every:2")) == ours(model, Trigger("every", 2))
    assert list(theirs.continuation(PROMPT, NEW, "verify")) == plain_greedy(model)
    # Drawn hot, so that even a model that repeats itself says much about its logits
    expected = ours(model, Trigger("every", 2), **HOT, generator=torch.Generator().manual_seed(0))
    assert list(theirs.continuation(PROMPT, NEW, "every:2", **HOT)) == expected
    assert ours(model, NEVER, **HOT, generator=torch.Generator().manual_seed(0)) != expected, "thinking matters"


def test_every_way_to_think_and_to_draw_is_the_same(make_thinking: MakeThinking, tmp_path: Path) -> None:
    model = make_thinking(tie_word_embeddings=True)
    export(loaded(model, tmp_path), tmp_path / "out", "auto")
    theirs = folder_code(tmp_path / "out")
    for think, trigger, sampling in [
        ("first", Trigger("first"), {}),
        ("entropy:2.5", Trigger("entropy", 2.5), {}),
        ("every:3", Trigger("every", 3), {"temperature": 1.3, "top_k": 20, "top_p": 0.9}),
        ("probability:0.5", Trigger("probability", 0.5), {"temperature": 0.7}),
    ]:
        expected = ours(model, trigger, **sampling, generator=torch.Generator().manual_seed(4))
        assert list(theirs.continuation(PROMPT, NEW, think, **sampling, seed=4)) == expected, think
