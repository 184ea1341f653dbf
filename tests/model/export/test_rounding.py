"""Folders in bf16: the verified weights, each rounded once, or nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from plumbline.data.damage import read_object
from plumbline.launcher.runtime.export import rounding
from plumbline.launcher.runtime.export.hugging_face import export
from plumbline.launcher.runtime.export.report import ExportError
from plumbline.launcher.runtime.export.rounding import INDEX, TOLERANCE, round_to_bf16
from plumbline.model.decoder import CausalLM
from tests.model.conftest import loaded

MakeModel = Callable[..., CausalLM]


@pytest.mark.parametrize(
    ("target", "shape"),
    [
        ("qwen3", {"num_key_value_heads": 2}),
        ("gpt2", {"family": "gpt2"}),
        ("compat", {"family": "outlier_protected", "mlp": "swiglu"}),
        ("native", {"family": "fog"}),
    ],
)
def test_a_folder_in_bf16_is_the_verified_one_rounded(
    make_model: MakeModel, tmp_path: Path, target: str, shape: dict[str, Any]
) -> None:
    model = loaded(make_model(**shape), tmp_path)
    exact, rounded = tmp_path / "fp32", tmp_path / "bf16"
    export(model, exact, target)
    report = export(model, rounded, target, in_bf16=True)
    assert report.rounded_error is not None
    assert 0 < report.rounded_error < TOLERANCE
    own = target == "native"
    kept = AutoModelForCausalLM.from_pretrained(rounded, dtype="auto", trust_remote_code=own).state_dict()
    for name, weight in load_file(exact / "model.safetensors").items():
        assert torch.equal(kept[name], weight.bfloat16())
    assert read_object(rounded / "config.json")["dtype"] == "bfloat16"
    assert f"rounded to bf16 since, logits within {report.rounded_error:.1e}" in (rounded / "README.md").read_text()


def test_the_index_of_several_files_has_the_size_of_all(make_model: MakeModel, tmp_path: Path) -> None:
    """Transformers divides the weights of large models."""
    exact, folder = tmp_path / "fp32", tmp_path / "divided"
    export(loaded(make_model(), tmp_path), exact, "auto")
    AutoModelForCausalLM.from_pretrained(exact).save_pretrained(folder, max_shard_size="20KB")
    before = read_object(folder / INDEX)
    round_to_bf16(folder, folder, own_code=False)
    files = [load_file(file) for file in folder.glob("model-*.safetensors")]
    assert len(files) > 1
    kept = {name: weight for file in files for name, weight in file.items()}
    for name, weight in load_file(exact / "model.safetensors").items():
        assert torch.equal(kept[name], weight.bfloat16())
    size = sum(weight.nbytes for weight in kept.values())
    assert read_object(folder / INDEX) == {**before, "metadata": {**before["metadata"], "total_size": size}}


def test_a_folder_that_bf16_breaks_is_not_exported(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding, "TOLERANCE", 1e-4)
    with pytest.raises(ExportError, match=r"out: with weights rounded to bf16, logits differ by .* leave out --dtype"):
        export(loaded(make_model(), tmp_path), tmp_path / "out", "auto", in_bf16=True)
    assert not (tmp_path / "out").exists()
