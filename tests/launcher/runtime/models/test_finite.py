"""Weights that are nan or infinite: one error that names file and tensor, from whatever folder they come."""

import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from plumbline.data.damage import DamagedFileError
from plumbline.launcher.runtime.checkpoint import store
from plumbline.launcher.runtime.models.finite import check_finite, is_finite
from plumbline.launcher.runtime.models.open import LoadedModel, load_model
from plumbline.model.generation import sample_token
from plumbline.model.sampling import Sampling
from tests.damage import reseal


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_value_among_many_is_found(value: float, dtype: torch.dtype) -> None:
    weight = torch.linspace(-3, 3, 1001, dtype=dtype)
    assert is_finite(weight)
    weight[500] = value
    assert not is_finite(weight)


@pytest.mark.parametrize(
    "other", [torch.arange(5), torch.empty(0), torch.tensor([True]), torch.zeros(3).to(torch.float8_e4m3fn)]
)
def test_other_tensors_pass(other: Tensor) -> None:
    assert is_finite(other)


def test_a_stranger_s_folder_is_refused_by_file_and_tensor(exported_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported_folder, tmp_path / "theirs"))
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    found = r"theirs/model\.safetensors: model\.layers\.0\.mlp\.up_proj\.weight: 1 of \d+ values are nan or inf; copy"
    with pytest.raises(DamagedFileError, match=found):
        load_model(folder, "cpu")


def test_a_run_that_diverged_is_refused_as_well(trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    newest = store.checkpoints(run / "checkpoints")[0]
    file = next(newest.glob("state/*.safetensors"))
    content = bytearray(file.read_bytes())
    begin = 8 + struct.unpack("<Q", content[:8])[0]
    content[begin:] = struct.pack("<f", torch.nan) * ((len(content) - begin) // 4)
    file.write_bytes(content)
    reseal(file)
    with pytest.raises(
        DamagedFileError, match=r"rank_00000\.safetensors: .* values are nan or inf; the run had diverged"
    ):
        load_model(newest, "cpu")


def test_a_tensor_that_no_file_has_is_named_with_its_folder(tmp_path: Path) -> None:
    with pytest.raises(DamagedFileError, match=rf"^{tmp_path}: weight: 3 of 3 values are nan or inf; remedy$"):
        check_finite({"bias": torch.ones(2), "weight": torch.full((3,), torch.inf)}, tmp_path, "remedy")


def test_logits_that_are_no_distribution_are_no_token(model: LoadedModel) -> None:
    logits = torch.zeros(2, model.vocab_size)
    logits[1, 7] = torch.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match="the model overflows; try --dtype fp32"):
            sample_token(logits, Sampling(temperature), None)
