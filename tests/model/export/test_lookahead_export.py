"""Exported thinkers: stock transformers and the folder's own lookahead.py say what the run's thoughts say.

As in test_export.py, no multiplier of the decoders is 1.
"""

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import plumbline.launcher.generate
from plumbline.launcher.runtime.config.stock import stock_entries
from plumbline.launcher.runtime.export.hugging_face import export
from plumbline.launcher.runtime.models.open import load_model
from plumbline.model.attention.context import LayerCache
from plumbline.model.config import ModelConfig
from plumbline.model.export import thinker
from plumbline.model.export.fold import Weights
from plumbline.model.export.from_stock import from_stock, model_section
from plumbline.model.lookahead.generation import Trigger, generate_thinking
from plumbline.model.lookahead.generation import think as think_once
from plumbline.model.objectives.latent_lookahead import LatentLookahead, LatentLookaheadConfig
from plumbline.model.objectives.objective import TrainedLM
from plumbline.model.parameterization.config import ParameterizationConfig
from plumbline.model.parameterization.multipliers import multipliers
from plumbline.model.sampling import Sampling
from tests.model.conftest import Enliven, MakeModel, continued, loaded

NEW = 12
PROMPT = torch.randint(61, (1, 5), generator=torch.Generator().manual_seed(2))
HOT: dict[str, Any] = {"temperature": 1.5}
MakeThinking = Callable[..., TrainedLM]


@pytest.fixture
def make_thinking(make_model: MakeModel, enliven: Enliven) -> MakeThinking:
    """Return a decoder whose thoughts matter; keywords are keys of the model, `look` those of the objective."""

    def make(look: dict[str, Any] | None = None, **shape: Any) -> TrainedLM:
        plain = make_model(**shape)
        config = LatentLookaheadConfig.model_validate({"horizon": 3, **(look or {})})
        model = TrainedLM(plain.config, plain.multipliers, config.make(plain.config, plain.multipliers, 0))
        model.load_state_dict(plain.state_dict(), strict=False)
        enliven(model.objective, 1)
        gain = cast(LatentLookahead, model.objective).thinker.gain
        assert gain is not None
        with torch.no_grad():
            gain.mul_(1 / plain.config.initializer_range)  # a state weighs as much as its mark
        return model.eval()

    return make


def folder_code(folder: Path, **options: Any) -> Any:
    """Return what `from lookahead import Lookahead` gives a user, on the folder's weights."""
    spec = importlib.util.spec_from_file_location("lookahead", folder / "lookahead.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Lookahead.from_pretrained(folder, dtype=torch.float32, **options)


def ours(model: TrainedLM, trigger: Trigger, new: int = NEW, **options: Any) -> list[int]:
    look = cast(LatentLookahead, model.objective)
    commits, generator = look.config.commit == "thoughts", options.pop("generator", None)
    sampling = Sampling(**{"temperature": 0.0, **options})
    stream = generate_thinking(
        model, look.thinker, commits, PROMPT, new, trigger, sampling=sampling, generator=generator
    )
    return [int(x) for x in stream]


def plain_greedy(model: TrainedLM) -> list[int]:
    return continued(model, PROMPT, NEW, temperature=0.0)[0].tolist()


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
    ("auto", "ArceeForCausalLM", {"family": "llama", "mlp": "relu2"}, {"growth": "fixed"}),
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
    print(f"\n{architecture} {report.lookahead.relative_error:.1e}")  # docs/export.md names the largest
    theirs = folder_code(folder, trust_remote_code=report.own_code)
    assert list(theirs.continuation(PROMPT, NEW, "every:2")) == ours(model, Trigger("every", 2))
    assert list(theirs.continuation(PROMPT, NEW, "verify")) == plain_greedy(model)
    # Drawn hot, so that even a model that repeats itself says much about its logits
    expected = ours(model, Trigger("every", 2), **HOT, generator=torch.Generator().manual_seed(0))
    assert list(theirs.continuation(PROMPT, NEW, "every:2", **HOT)) == expected


PROJECTED: dict[str, Any] = {"embedding_projection": True}


@pytest.mark.parametrize(
    ("target", "shape", "look"),
    [
        ("auto", {"family": "llama"}, {}),
        ("auto", {"tie_word_embeddings": True, "sliding_window": 6}, {**COMMIT, **CAUSAL}),
        ("granite", {"family": "llama"}, FIXED),
        ("granite", {"family": "llama", "tie_word_embeddings": True}, {}),
        ("auto", {"family": "gpt2", "tie_word_embeddings": True}, FIXED),
        ("auto", OP, {}),
        ("auto", {**SANDWICH, "qk_norm": "none"}, FIXED),
        ("auto", {"parallel": True, "norm": "layernorm", "norm_bias": False, "qk_norm": "none"}, {}),
    ],
)
@torch.no_grad()
def test_a_decoder_of_the_folder_s_weights_thinks_as_the_folder_does(
    make_thinking: MakeThinking, tmp_path: Path, target: str, shape: dict[str, Any], look: dict[str, Any]
) -> None:
    """Under another parameterization than the exported run had."""
    source, folder = make_thinking(look, **shape), tmp_path / "out"
    export(loaded(source, tmp_path), folder, target)
    model = started_from(folder, source, {"rule": "completep", "base_hidden_size": 8, "base_num_hidden_layers": 3})
    assert model is not None
    expected, found = (slots(each) for each in (source, model))
    assert ((found - expected).abs().max() / expected.abs().max()).item() <= 1e-5


@pytest.mark.parametrize(("target", "shape"), [("compat", OP), ("auto", {**PROJECTED, "final_norm": True})])
def test_a_thinker_that_needs_a_norm_or_a_projection_is_not_taken_over(
    make_thinking: MakeThinking, tmp_path: Path, target: str, shape: dict[str, Any]
) -> None:
    source, folder = make_thinking({}, **shape), tmp_path / "out"
    export(loaded(source, tmp_path), folder, target)
    assert started_from(folder, source, {"rule": "sp"}) is None


def started_from(folder: Path, source: TrainedLM, rule: dict[str, Any]) -> TrainedLM | None:
    """Return the model with which a run starts from a folder, or None if it cannot think as the folder does."""
    entries = stock_entries(folder)
    config = ModelConfig.model_validate(model_section(entries))
    applied = multipliers(config, ParameterizationConfig.model_validate(rule))
    with safe_open(folder / thinker.FILE, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        settings = json.loads(file.metadata()["settings"])
    thoughts = thinker.thinker_from(entries, settings, tensors, config, applied)
    if thoughts is None:
        return None
    look = cast(LatentLookahead, source.objective).config
    model = TrainedLM(config, applied, look.make(config, applied, 0))
    plain = from_stock(entries, load_file(folder / "model.safetensors"), config, applied)
    model.load_state_dict({**plain, **thoughts}, strict=not config.tie_word_embeddings)
    model.tie_weights()
    return model.eval()


def slots(model: TrainedLM) -> Tensor:
    """Return the logits of a thought's slots at the end of the prompt."""
    cache = cast(list[LayerCache], model.new_cache(1, PROMPT.size(1)))
    look = cast(LatentLookahead, model.objective)
    states, _ = think_once(model, look.thinker, model.model(PROMPT, cache=[*cache])[:, -1:], cache)
    logits: Tensor = model.lm_head(states[0], None, 0.0)
    return logits


def test_every_way_to_think_and_to_draw_is_the_same(make_thinking: MakeThinking, tmp_path: Path) -> None:
    model = make_thinking(tie_word_embeddings=True)
    export(loaded(model, tmp_path), tmp_path / "out", "auto")
    theirs = folder_code(tmp_path / "out")
    ways: list[tuple[str, Trigger, dict[str, Any]]] = [
        ("first", Trigger("first"), {}),
        ("entropy:2.5", Trigger("entropy", 2.5), {}),
        ("every:3", Trigger("every", 3), {"temperature": 1.3, "top_k": 20, "top_p": 0.9}),
        ("probability:0.5", Trigger("probability", 0.5), {"temperature": 0.7}),
    ]
    for think, trigger, sampling in ways:
        expected = ours(model, trigger, **sampling, generator=torch.Generator().manual_seed(4))
        assert list(theirs.continuation(PROMPT, NEW, think, **sampling, seed=4)) == expected, think


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_thoughts_reach_beyond_the_last_position(make_thinking: MakeThinking, tmp_path: Path, family: str) -> None:
    """At the end of the context, where slots have no position of their own."""
    model, new = make_thinking(family=family), 48 - PROMPT.size(1)
    export(loaded(model, tmp_path), tmp_path / "out", "auto")
    theirs = folder_code(tmp_path / "out")
    assert list(theirs.continuation(PROMPT, new, "every:1")) == ours(model, Trigger("every", 1), new)


def left_out(folder: Path) -> str:
    """Return why a folder cannot think, which holds the plain model all the same."""
    assert not (folder / "lookahead.py").exists()
    assert not (folder / "lookahead.safetensors").exists()
    assert (folder / "model.safetensors").is_file()
    (row,) = re.findall(r"\| Thoughts \| left out: (.*) \|", (folder / "README.md").read_text())
    return str(row)


WRONG: dict[str, Callable[[Weights], Weights]] = {
    "gain": lambda tensors: {**tensors, "gain": tensors["gain"] * 1.001},
    "role": lambda tensors: {**tensors, "role": tensors["role"] * 1.001},
    "waiting": lambda tensors: {**tensors, "waiting": tensors["waiting"].flip(0)},
}


@pytest.mark.parametrize("mistake", WRONG)
@pytest.mark.parametrize("case", [6, 7, 14])
def test_a_wrong_tensor_is_found_and_the_thinker_left_out(
    make_thinking: MakeThinking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: int, mistake: str
) -> None:
    target, _, shape, look = CASES[case]
    model, right = make_thinking({**look, **FIXED, "passes": 1}, **shape), thinker.export_thinker

    def wrong(*arguments: Any) -> tuple[dict[str, Any], Weights]:
        settings, tensors = right(*arguments)
        return settings, WRONG[mistake](tensors)

    monkeypatch.setattr(thinker, "export_thinker", wrong)
    report = export(loaded(model, tmp_path), tmp_path / "out", target)
    assert report.lookahead is not None
    assert report.lookahead.left_out == left_out(tmp_path / "out")
    assert "its logits differ by" in report.lookahead.left_out


@pytest.mark.parametrize(
    ("case", "right", "wrong"),
    [
        (0, "text.positions[-1] + torch", "text.positions[-1] + 1 + torch"),  # rotary
        (8, "text.positions[-1] + torch", "text.positions[-1] + 1 + torch"),  # learned
        (0, "start = slot if causal else 0", "start = slot"),
        (1, 'self.settings.within == "causal"', "False"),
        (2, "self.settings.passes - 1", "self.settings.passes - 2"),
        (5, "committed.take_over(text, self.settings.horizon)", "pass"),
        (11, "if self.projection is not None", "if False"),
        (17, "self.positions < self.window", "self.positions < self.window + 1"),
        (0, "                text.forget(self.settings.horizon)\n            position", "            position"),
    ],
)
def test_wrong_code_is_found(
    make_thinking: MakeThinking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: int, right: str, wrong: str
) -> None:
    target, _, shape, look = CASES[case]
    code, copy = thinker.CODE.read_text(), tmp_path / "lookahead.py"
    assert code.count(right) == 1
    copy.write_text(code.replace(right, wrong))
    monkeypatch.setattr(thinker, "CODE", copy)
    export(loaded(make_thinking(look, **shape), tmp_path), tmp_path / "out", target)
    assert re.match(r"its (logits differ by|greedy token \d+ is another)", left_out(tmp_path / "out"))


def test_a_user_follows_the_card(make_thinking: MakeThinking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is a plain model of its class; the code stops at the end of text."""
    model, folder = make_thinking(tie_word_embeddings=True), tmp_path / "out"
    export(loaded(model, tmp_path), folder, "auto")
    assert (folder / "lookahead.py").read_text() == thinker.CODE.read_text()
    assert not (folder / "__pycache__").exists(), "the check compiles nothing there"
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if "objective" in name]  # noqa: SIM118 - safe_open is no dict
    card = (folder / "README.md").read_text()
    code = "".join(re.findall("```python\n(.*?)```", card, re.DOTALL))
    assert f'sys.path.insert(0, "{folder}")' in code
    monkeypatch.setattr(sys, "path", [*sys.path])
    shown: dict[str, Any] = {}
    exec(code.replace("[...]", "[5, 6, 7]").replace("64", "8"), shown)  # a model of a task: it has no tokenizer
    assert shown["tokens"].tolist()[:3] == [5, 6, 7]
    theirs = folder_code(folder)
    all_new = list(theirs.continuation(PROMPT, NEW, "every:4", **HOT))
    theirs.model.generation_config.eos_token_id = [60, all_new[4]]
    stopped = theirs.generate(PROMPT, NEW, "every:4", **HOT)
    assert stopped[0].tolist() == PROMPT[0].tolist() + all_new[: all_new.index(all_new[4]) + 1]


@pytest.mark.parametrize(
    ("think", "options", "message"),
    [
        ("every:0", {}, "think = 'every:0': it is first, every:TOKENS"),
        ("probability:2", {}, "it is first, every:TOKENS"),
        ("verify", {"temperature": 0.5}, "leave temperature out"),
        ("first", {"input_ids": PROMPT.expand(2, -1)}, "one prompt at a time"),
        ("first", {"max_new_tokens": 44}, r"5 prompt tokens \+ 44 new ones: the model has 48 positions"),
    ],
)
def test_what_cannot_be_done_is_refused(
    make_thinking: MakeThinking, tmp_path: Path, think: str, options: dict[str, Any], message: str
) -> None:
    export(loaded(make_thinking(), tmp_path), tmp_path / "out", "auto")
    theirs = folder_code(tmp_path / "out")
    with pytest.raises(ValueError, match=message):
        theirs.generate(**{"input_ids": PROMPT, "max_new_tokens": 3, "think": think, **options})


def test_our_generate_says_where_the_code_is(
    make_thinking: MakeThinking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(loaded(make_thinking(), tmp_path), tmp_path / "out", "auto")
    with pytest.raises(ValueError, match=r"thinks with its own lookahead\.py"):
        assert load_model(tmp_path / "out", torch.device("cpu")).decoding
    arguments = ["--model", str(tmp_path / "out"), "--think", "every:2"]
    monkeypatch.setattr(sys, "argv", ["generate.py", *arguments])
    with pytest.raises(ValueError, match=r"thinks with its own lookahead\.py"):
        plumbline.launcher.generate.main()
