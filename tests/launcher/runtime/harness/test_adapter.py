"""The model that lm-evaluation-harness asks: likelihoods against direct sums, greedy continuations, refusals."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from plumbline.launcher.runtime.harness.adapter import HarnessModel
from plumbline.launcher.runtime.models.open import LoadedModel, load_tokenizer
from plumbline.model.decoder import CausalLM
from tests.launcher.runtime.conftest import (
    CONTEXT,
    DOCUMENTS,
    EOS,
    QUESTIONS,
    asks,
    choice_nats,
    document_nats,
    log_probs,
    nats_of,
)


def test_a_text_has_the_likelihood_of_its_tokens_one_by_one(writer: LoadedModel, tokenizer: Any) -> None:
    found = HarnessModel(writer, tokenizer, batch_size=3).loglikelihood_rolling([asks(text) for text in DOCUMENTS])
    assert found == pytest.approx([document_nats(writer, text) for text in DOCUMENTS], rel=1e-5)
    assert found[DOCUMENTS.index("")] == 0.0


def test_a_continuation_has_the_likelihood_of_its_tokens_one_by_one(writer: LoadedModel, tokenizer: Any) -> None:
    requests = [asks(q["question"], f" {choice}") for q in QUESTIONS for choice in q["choices"]]
    found = HarnessModel(writer, tokenizer, batch_size=4).loglikelihood(requests)
    assert [nats for nats, _ in found] == pytest.approx(
        [n for q in QUESTIONS for n in choice_nats(writer, q)], rel=1e-5
    )


def test_only_what_greedy_decoding_gives_is_greedy(writer: LoadedModel, tokenizer: Any) -> None:
    greedy = greedy_text(writer, "import", 6)
    others = [chr(ord(greedy[0]) ^ 1) + greedy[1:], greedy[:-1] + chr(ord(greedy[-1]) ^ 1)]
    found = HarnessModel(writer, tokenizer).loglikelihood([asks("import", text) for text in (greedy, *others)])
    assert [exact for _, exact in found] == [True, False, False]


def test_a_context_that_is_all_spaces_is_the_end_of_another_text(writer: LoadedModel, tokenizer: Any) -> None:
    """lm_eval gives them to the continuation, and nothing is left to predict its first token from."""
    ((nats, _),) = HarnessModel(writer, tokenizer).loglikelihood([asks(" ", "x")])
    assert nats == pytest.approx(nats_of(writer, [EOS], list(b" x")), rel=1e-5)


def test_what_is_too_long_loses_its_beginning(writer: LoadedModel, tokenizer: Any) -> None:
    text, answer = "a long beginning " * 4, " and its end"
    seen = text[-(CONTEXT + 1 - len(answer)) :]
    adapter = HarnessModel(writer, tokenizer)
    # The last space of a context goes to the continuation
    found = adapter.loglikelihood([asks(text.rstrip(), answer), asks(text.rstrip()[-len(seen) :], answer)])
    assert found[0] == found[1]
    assert found[0][0] == pytest.approx(nats_of(writer, list(text.rstrip().encode()), list(answer.encode())), rel=1e-5)
    assert adapter.loglikelihood([asks("x" * 40, "y" * CONTEXT)])[0][0] < 0
    with pytest.raises(ValueError, match=r"a continuation of 33 tokens does not fit .* which sees 32"):
        adapter.loglikelihood([asks("x", "y" * (CONTEXT + 1))])


@pytest.mark.parametrize(("question", "choice"), [("import", ""), ("i", ""), ("call(", ")")])
def test_a_choice_without_a_token_is_refused(writer: LoadedModel, trained: Path, question: str, choice: str) -> None:
    """It had a probability of one: no other choice could win."""
    tokenizer = load_tokenizer(trained / "tokenizer")
    tokenizer.add_tokens(["()"])  # the tokenizer joins what the task separates
    with pytest.raises(
        ValueError, match=r"second text adds no token to the first.* change the task's target_delimiter"
    ):
        HarnessModel(writer, tokenizer).loglikelihood([asks("import", " os"), asks(question, choice)])


def test_batches_change_nothing(writer: LoadedModel, tokenizer: Any) -> None:
    documents = [asks(text) for text in DOCUMENTS]
    choices = [asks(q["question"], f" {choice}") for q in QUESTIONS for choice in q["choices"]]
    alone, together = (HarnessModel(writer, tokenizer, batch_size) for batch_size in (1, 64))
    assert together.loglikelihood_rolling(documents) == pytest.approx(alone.loglikelihood_rolling(documents), rel=1e-5)
    ones, many = alone.loglikelihood(choices), together.loglikelihood(choices)
    assert [nats for nats, _ in many] == pytest.approx([nats for nats, _ in ones], rel=1e-5)
    assert [exact for _, exact in many] == [exact for _, exact in ones]


def test_a_text_is_one_document(writer: LoadedModel, tokenizer: Any) -> None:
    """Where the model masks documents, and counts positions from their beginnings, as where it does not."""
    plain = writer.module
    assert isinstance(plain, CausalLM)
    masked = CausalLM(plain.config.model_copy(update={"document_mask": True}), plain.multipliers)
    masked.load_state_dict(plain.state_dict())
    requests = [asks(text) for text in DOCUMENTS]
    found = HarnessModel(replace(writer, module=masked.eval()), tokenizer).loglikelihood_rolling(requests)
    assert found == pytest.approx(HarnessModel(writer, tokenizer).loglikelihood_rolling(requests), rel=1e-5)


def greedy_text(model: LoadedModel, prompt: str, count: int) -> str:
    """Return the likeliest byte, again and again; each from a fresh forward pass."""
    tokens = list(prompt.encode())
    for _ in range(count):
        tokens.append(int(log_probs(model, tokens)[-1].argmax()))
    return bytes(tokens[-count:]).decode()


def test_generation_stops_before_the_first_string(writer: LoadedModel, tokenizer: Any) -> None:
    whole = greedy_text(writer, "def ", 12)
    early, late = whole[2:4], whole[5:7]
    assert 0 < whole.index(early) < whole.index(late), whole
    overlapping = [whole[3:5], whole[2:5]]  # the same token completes both
    until = [[], late, [late, early], overlapping, ["", "never this"], None]
    requests = [asks("def ", {"until": strings, "max_gen_toks": 12}) for strings in until]
    cut = [whole, whole[: whole.index(late)], whole[: whole.index(early)], whole[:2], whole, whole]
    assert HarnessModel(writer, tokenizer).generate_until(requests) == cut


def test_generation_stops_at_a_special_token(writer: LoadedModel, trained: Path) -> None:
    """As at <|im_end|> of a chat, which is not part of the text that is returned."""
    tokenizer, whole = load_tokenizer(trained / "tokenizer"), greedy_text(writer, "def ", 12)
    assert whole[2] not in whole[:2]
    tokenizer.add_special_tokens({"additional_special_tokens": [whole[2]]})
    for until in (whole[2], [whole[5:7], whole[2]]):
        request = asks("def ", {"until": until, "max_gen_toks": 12})
        assert HarnessModel(writer, tokenizer).generate_until([request]) == [whole[:2]]


def test_generation_sees_the_end_of_a_long_text(writer: LoadedModel, tokenizer: Any) -> None:
    text = "".join(map(chr, range(48, 112)))
    (found,) = HarnessModel(writer, tokenizer).generate_until([asks(text, {"until": [], "max_gen_toks": 5})])
    assert found == greedy_text(writer, text[-(CONTEXT - 5) :], 5)


def test_generation_after_nothing_begins_a_text(writer: LoadedModel, tokenizer: Any) -> None:
    (found,) = HarnessModel(writer, tokenizer).generate_until([asks("", {"until": [], "max_gen_toks": 1})])
    assert found == chr(int(log_probs(writer, [EOS])[-1].argmax()))


def test_generation_ends_with_the_text(writer: LoadedModel, tokenizer: Any) -> None:
    """Of a model that ends the text where the other writes its third byte."""
    whole = greedy_text(writer, "def ", 6)
    assert whole[2] not in whole[:2]
    module = copy.deepcopy(writer.module)
    with torch.no_grad():
        head = module.get_parameter("lm_head.weight")
        head[EOS] = head[ord(whole[2])]
        head[ord(whole[2])] = 0
    requests = [asks("def ", {"until": ["\0"], "max_gen_toks": 6})]
    assert HarnessModel(replace(writer, module=module), tokenizer).generate_until(requests) == [whole[:2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_sample": True, "temperature": 0.7, "max_gen_toks": 4}, "only greedy decoding"),
        ({"until": ["\n"]}, r"max_gen_toks 256 leaves no room for a context: .* sees 32 tokens"),
    ],
)
def test_generation_that_cannot_be_is_refused(
    model: LoadedModel, tokenizer: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        HarnessModel(model, tokenizer).generate_until([asks("def ", options)])


def test_what_a_tokenizer_puts_before_a_text_is_there_once(model: LoadedModel, trained: Path) -> None:
    tokenizer = load_tokenizer(trained / "tokenizer")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.eos_token} $A", special_tokens=[(tokenizer.eos_token, EOS)]
    )
    adapter = HarnessModel(model, tokenizer)
    assert adapter.tok_encode("x") == adapter.tok_encode("<|endoftext|>x") == [EOS, ord("x")]
    assert adapter.tok_encode("x", add_special_tokens=False) == [ord("x")]


def test_a_tokenizer_without_ends_is_refused(model: LoadedModel) -> None:
    with pytest.raises(ValueError, match=r"neither bos_token nor eos_token.*set eos_token in tokenizer_config"):
        HarnessModel(model, SimpleNamespace(bos_token_id=None, eos_token_id=None))
    assert HarnessModel(model, SimpleNamespace(bos_token_id=None, eos_token_id=0)).prefix_token_id == 0
    assert HarnessModel(model, SimpleNamespace(bos_token_id=0, eos_token_id=1)).prefix_token_id == 0
