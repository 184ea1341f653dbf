"""What is built for training lies on the device that it is trained on, and is refused where it cannot be."""

from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.engine.build import build_for_training, compiles, move_buffers

CPU = torch.device("cpu")


def test_every_buffer_is_moved_and_no_parameter(tiny_config: Path) -> None:
    """The meta device stands in for a GPU: what lies there can be told from what lies on the CPU."""
    config = load_config(tiny_config, ["model.attention=pruned"])
    model = build_for_training(config, plan_run(config).rows, CPU)
    names = [name for name, _ in model.named_buffers()]
    assert sum(name.endswith("alpha") for name in names) == config.model.num_hidden_layers
    move_buffers(model, torch.device("meta"))
    assert [name for name, buffer in model.named_buffers() if buffer.device.type == "meta"] == names
    assert {parameter.device for parameter in model.parameters()} == {CPU}
    assert not any("alpha" in name for name in model.state_dict()), "what checkpoints hold is as before"


def test_what_a_checkpoint_will_fill_is_not_drawn(tiny_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(tiny_config, ["model.frozen_qk=true"])
    rows = plan_run(config).rows
    drawn = build_for_training(config, rows, CPU)
    monkeypatch.setattr(torch.Tensor, "normal_", None)
    restored = build_for_training(config, rows, CPU, restored=True)
    for name, parameter in restored.named_parameters():
        assert parameter.isfinite().all()
        assert parameter.requires_grad == drawn.get_parameter(name).requires_grad, name


@pytest.mark.parametrize("attention", ["shaped", "pruned"])
def test_a_gpu_that_cannot_repeat_a_kind_of_attention_is_refused(tiny_config: Path, attention: str) -> None:
    config = load_config(tiny_config, [f"model.attention={attention}", "run.deterministic=true"])
    with pytest.raises(ConfigError, match=rf"run.deterministic = true: model.attention = {attention} .*cumsum"):
        build_for_training(config, plan_run(config).rows, torch.device("cuda"))
    assert build_for_training(config, plan_run(config).rows, CPU) is not None, "a CPU can"


@pytest.mark.parametrize("overrides", [["run.deterministic=true"], ["model.attention=shaped"]])
def test_a_gpu_is_refused_nothing_else(tiny_config: Path, overrides: list[str]) -> None:
    config = load_config(tiny_config, overrides)
    assert build_for_training(config, plan_run(config).rows, torch.device("cuda")) is not None


@pytest.mark.parametrize(
    ("compiled", "said"),
    [("null", "train.compile is left out, and blocks are compiled on a GPU: "), ("true", "train.compile is true: ")],
)
def test_a_host_with_nothing_to_compile_with_is_refused(
    tiny_config: Path, compiled: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    config, gpu = load_config(tiny_config, [f"train.compile={compiled}"]), torch.device("cuda")
    with pytest.raises(ConfigError, match=f"{said}C compiler 'no-such-compiler' of CC not found"):
        build_for_training(config, plan_run(config).rows, gpu)
    uncompiled = load_config(tiny_config, ["train.compile=false"])
    assert build_for_training(uncompiled, plan_run(uncompiled).rows, gpu) is not None


@pytest.mark.parametrize(
    ("torch_version", "family", "compiled"),
    [("2.11.0+cu130", "sas", False), ("2.13.0", "sas", True), ("2.11.0+cu130", "shaped", True)],
)
def test_learned_gains_are_compiled_for_a_gpu_by_a_torch_that_can(
    tiny_config: Path, torch_version: str, family: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(torch_version))
    family_of = [f"model.family={family}", "model.num_key_value_heads=2"]
    config, gpu = load_config(tiny_config, family_of), torch.device("cuda")
    assert compiles(config, gpu) is compiled
    assert build_for_training(config, plan_run(config).rows, gpu) is not None
    if not compiled:
        asked = load_config(tiny_config, [*family_of, "train.compile=true"])
        with pytest.raises(ConfigError, match=r"train\.compile is true: torch 2\.11.*, or set train\.compile=false"):
            build_for_training(asked, plan_run(asked).rows, gpu)
        assert build_for_training(asked, plan_run(asked).rows, CPU) is not None, "a CPU's compiler can"


@pytest.mark.parametrize(("typed", "exact"), [([], False), (["precision.activations=8"], True)])
def test_what_is_rounded_is_divided_as_uncompiled_code_does(tiny_config: Path, typed: list[str], exact: bool) -> None:
    from torch._inductor import config as inductor

    config = load_config(tiny_config, ["train.compile=true", *typed])
    with inductor.patch("eager_numerics.division_rounding", not exact):  # as a run before in this process left it
        build_for_training(config, plan_run(config).rows, CPU)
        assert inductor.eager_numerics.division_rounding == exact
