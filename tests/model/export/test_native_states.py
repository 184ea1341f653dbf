"""What the native class returns besides logits, and in which form."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plumbline.launcher.runtime.export.hugging_face import export
from plumbline.launcher.runtime.models.open import load_model
from plumbline.model.decoder import CausalLM
from tests.model.conftest import loaded

MakeModel = Callable[..., CausalLM]


@torch.no_grad()
def test_states_are_returned_where_they_are_asked_for(make_model: MakeModel, tmp_path: Path) -> None:
    export(loaded(make_model(), tmp_path), tmp_path / "out", "native")
    model: Any = load_model(tmp_path / "out", torch.device("cpu")).module
    tokens = torch.arange(5, 17)[None]
    assert model(input_ids=tokens).hidden_states is None
    found = model(input_ids=tokens, output_hidden_states=True)
    first, *between, last = found.hidden_states
    assert len(between) == model.config.num_hidden_layers - 1
    torch.testing.assert_close(first, model.model.embed_tokens(tokens))
    torch.testing.assert_close(model.lm_head(last), found.logits)
    entered: list[torch.Tensor] = []
    hook = model.model.layers[1].register_forward_pre_hook(lambda _module, inputs: entered.append(inputs[0]))
    model.config.output_hidden_states = True
    again = model(input_ids=tokens)
    hook.remove()
    assert torch.equal(entered[0], again.hidden_states[1])
    options = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    said = model.generate(tokens, output_hidden_states=True, **options)
    assert [len(each) for each in said.hidden_states] == [model.config.num_hidden_layers + 1] * 2


@torch.no_grad()
def test_a_tuple_is_returned_where_it_is_asked_for(make_model: MakeModel, tmp_path: Path) -> None:
    export(loaded(make_model(), tmp_path), tmp_path / "out", "native")
    model: Any = load_model(tmp_path / "out", torch.device("cpu")).module
    tokens = torch.arange(5, 17)[None]
    usual = model(input_ids=tokens, labels=tokens)
    loss, logits, *_ = model(input_ids=tokens, labels=tokens, return_dict=False)
    (state,) = model.model(input_ids=tokens, use_cache=False, return_dict=False)
    assert torch.equal(loss, usual.loss)
    assert torch.equal(logits, usual.logits)
    assert torch.equal(model.lm_head(state), usual.logits)
    model.config.return_dict = False
    assert torch.equal(model(input_ids=tokens)[0], usual.logits)


@torch.no_grad()
def test_the_implementation_of_attention_may_be_changed(make_model: MakeModel, tmp_path: Path) -> None:
    export(loaded(make_model(), tmp_path), tmp_path / "out", "native")
    model: Any = load_model(tmp_path / "out", torch.device("cpu")).module
    tokens = torch.arange(5, 17)[None]
    usual = model(input_ids=tokens).logits
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    torch.testing.assert_close(model(input_ids=tokens).logits, usual, rtol=1e-4, atol=1e-4)


def test_a_fused_kernel_that_ignores_a_cap_is_refused(make_model: MakeModel, tmp_path: Path) -> None:
    export(loaded(make_model(attn_logit_softcapping=2.0), tmp_path), tmp_path / "out", "native")
    model: Any = load_model(tmp_path / "out", torch.device("cpu")).module
    with pytest.raises(ValueError, match="does not support an attention implementation"):
        model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "eager"
