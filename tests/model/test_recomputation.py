"""What is computed again in the backward pass changes no bit, and is computed again where it was asked for."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from plumbline.model.decoder import CausalLM
from plumbline.model.recomputation import Recomputed, recompute
from tests.model.conftest import MakeModel

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3", "num_key_value_heads": 2},
    "dropout": {"dropout": 0.3, "sliding_window": 5},
    "gpt2": {"family": "gpt2", "dropout": 0.1},
    "outlier_protected": {"family": "outlier_protected"},
    "value_residual": {"value_residual": True, "dropout": 0.1},
    "explicit": {"attn_logit_softcapping": 5.0, "dropout": 0.1},
    "pruned": {"attention": "pruned"},
}


class Products(TorchDispatchMode):
    """Count the matrix products that are computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("mm", "addmm")
        return func(*args, **(kwargs or {}))


def tokens() -> Tensor:
    return torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(1))


def results(model: CausalLM, recomputed: Recomputed) -> list[Tensor | None]:
    """Return the loss and all gradients."""
    recompute(list(model.model.layers), recomputed)  # type: ignore[arg-type]
    model.zero_grad()
    torch.manual_seed(0)
    loss, _ = model(tokens(), labels=tokens().roll(-1, dims=1))
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("keys", MODELS)
@pytest.mark.parametrize("recomputed", ["selective", "full", 2])
def test_recomputation_changes_no_bit(make_model: MakeModel, keys: str, recomputed: Recomputed) -> None:
    model = make_model(**MODELS[keys]).train()
    for plain, other in zip(results(model, "none"), results(model, recomputed), strict=True):
        assert plain is not None
        assert other is not None
        assert torch.equal(plain, other)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("recomputed", ["selective", "full"])
def test_blocks_that_run_twice_under_autocast_are_computed_again(make_model: MakeModel, recomputed: Recomputed) -> None:
    """As in ZeRO-0 in bf16: the second time, autocast has the rounded weights of the first."""
    model = make_model(value_residual=True).train()

    def gradients(recomputed: Recomputed) -> list[Tensor | None]:
        recompute(list(model.model.layers), recomputed)  # type: ignore[arg-type]
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = sum(model(tokens(), labels=tokens().roll(turn, dims=1))[0] for turn in (-1, -2))
        assert isinstance(loss, Tensor)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    for plain, other in zip(gradients("none"), gradients(recomputed), strict=True):
        assert plain is not None
        assert other is not None
        if recomputed == "full":
            assert torch.equal(plain, other)
        torch.testing.assert_close(plain, other, rtol=2**-7, atol=2**-7 * plain.abs().max().item())


@pytest.mark.parametrize(("recomputed", "calls"), [("none", 3), ("full", 6), (2, 4), (3, 4), (1, 6), (4, 3)])
def test_every_nth_block_is_run_again(make_model: MakeModel, recomputed: Recomputed, calls: int) -> None:
    model, made = make_model().train(), []
    for layer in model.model.layers:
        layer.get_submodule("mlp").register_forward_pre_hook(lambda *_: made.append(1))
    results(model, recomputed)
    assert len(made) == calls


@pytest.mark.parametrize(("recomputed", "products"), [("none", 0), ("selective", 0), ("full", 6 * 3)])
def test_selective_repeats_no_product(make_model: MakeModel, recomputed: Recomputed, products: int) -> None:
    """A linear layer is one product forward and two backward; those above are made again, but a block's last one."""
    model = make_model().train()
    linears = sum(isinstance(module, nn.Linear) for module in model.model.modules())
    assert linears == 7 * 3
    with Products() as made:
        results(model, recomputed)
    assert made.count == 3 * linears + products + 3, "and the head's three"


def test_nothing_is_recomputed_in_evaluation(make_model: MakeModel) -> None:
    model, made = make_model().eval(), []
    model.get_submodule("model.layers.0.mlp").register_forward_pre_hook(lambda *_: made.append(1))
    results(model, "full")
    assert len(made) == 1
