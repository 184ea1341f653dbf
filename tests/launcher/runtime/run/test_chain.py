"""The chain of a run: what is hashed of a sample, what a line is bound to, and what stays of it when a run goes on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from plumbline.data.config import DataConfig, SourceConfig
from plumbline.data.damage import DamagedFileError
from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.run import chain
from plumbline.launcher.runtime.run.chain import BEGIN, CHAIN, FED, ChainFile, Step, digest_of, read_chain

if TYPE_CHECKING:
    from pathlib import Path


def batches_of(corpus: Path, ranks: int, micro_batch: int) -> list[list[Any]]:
    """Return the micro-batches of step 3 of each rank."""
    source = SourceConfig(path=str(corpus))
    config = DataConfig(train=[source], sequence_length=32, global_batch_size=16, micro_batch_size=micro_batch)
    return [[*TrainBatches(config, 1, rank, ranks).micro_batches(3)] for rank in range(ranks)]


def test_the_digest_of_a_step_does_not_know_the_ranks(corpus: Path) -> None:
    found = set()
    for ranks, micro_batch in ((1, 16), (1, 4), (2, 8), (4, 2), (16, 1)):
        limbs = [chain.to_limbs(digest_of(mine)) for mine in batches_of(corpus, ranks, micro_batch)]
        found.add(chain.in_hex(chain.from_limbs([sum(column) for column in zip(*limbs, strict=True)])))
    assert len(found) == 1
    assert len(found.pop()) == 64


@pytest.mark.parametrize("name", FED)
def test_all_that_the_model_is_fed_is_in_the_digest(corpus: Path, name: str) -> None:
    (mine,) = batches_of(corpus, 1, 4)
    before = digest_of(mine)
    mine[2][name] = mine[2][name].clone()
    mine[2][name].view(-1)[-1] += 1
    assert digest_of(mine) != before


def test_samples_that_swap_their_tokens_have_another_digest(corpus: Path) -> None:
    """Their sum would be the same if the number of a sample were not hashed with its tokens."""
    (mine,) = batches_of(corpus, 1, 16)
    swapped = {**mine[0], "sample_index": mine[0]["sample_index"].flip(0)}
    assert digest_of([swapped]) != digest_of(mine)
    assert digest_of([{name: tensor.flip(0) for name, tensor in mine[0].items()}]) == digest_of(mine)


def test_sums_of_limbs_carry() -> None:
    digests = [2**256 - 1, 2**255 + 12345, 7]
    limbs = torch.tensor([chain.to_limbs(digest) for digest in digests], dtype=torch.int64)
    assert chain.from_limbs(limbs.sum(0).tolist()) == sum(digests) % 2**256


def write(folder: Path, first: int, last: int) -> ChainFile:
    """Write steps of a run that saves at every third, as training does: a checkpoint is named at the next save."""
    file = ChainFile(folder, first)
    for step in range(first + 1, last + 1):
        file.add_step(Step(step, f"{step:064x}", 3.0 / step, float("inf") if step == 5 else 0.1 * step))
        if step % 3 == 0:
            if step > 3:
                file.add_checkpoint(step - 3, folder / f"{step - 3}.json")
            (folder / f"{step}.json").write_text(f"manifest of step {step}")
    return file


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Return a folder with the chain of ten steps and two checkpoints, of three."""
    write(tmp_path, 0, 10).close()
    return tmp_path


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / CHAIN).read_text().splitlines()]


def put(folder: Path, lines: list[dict[str, Any]]) -> None:
    (folder / CHAIN).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_a_chain_reads_as_it_was_written(written: Path) -> None:
    found = read_chain(written / CHAIN)
    assert found.problems == []
    assert list(found.steps) == list(range(1, 11))
    assert found.steps[7] == Step(7, f"{7:064x}", 3.0 / 7, 0.1 * 7)
    assert found.steps[5].grad_norm == float("inf")
    assert found.checkpoints == {step: chain.manifest_hash(written / f"{step}.json") for step in (3, 6)}
    assert found.head == lines_of(written)[-1]["hash"] != BEGIN


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        (3, "loss", 0.74),
        (3, "grad_norm", 0.41),
        (3, "samples", "0" * 64),
        (3, "step", 5),
        (3, "hash", "0" * 64),
        (6, "checkpoint", 4),
        (6, "manifest", "0" * 64),
    ],
)
def test_a_value_that_was_altered_is_found(written: Path, line: int, key: str, value: Any) -> None:
    lines = lines_of(written)
    assert lines[line][key] != value
    lines[line][key] = value
    put(written, lines)
    found = read_chain(written / CHAIN).problems
    assert f"line {line + 1}: its hash" in found[0][1]


@pytest.mark.parametrize("what", ["first", "amid", "moved", "twice"])
def test_a_line_that_is_missing_or_in_another_place_is_found(written: Path, what: str) -> None:
    lines = lines_of(written)
    if what in ("first", "amid"):
        del lines[0 if what == "first" else 4]
    elif what == "moved":
        lines[4], lines[5] = lines[5], lines[4]
    else:
        lines.insert(4, lines[3])
    put(written, lines)
    assert read_chain(written / CHAIN).problems


def test_a_step_left_out_by_who_links_the_rest_anew_is_found(written: Path) -> None:
    head, lines = BEGIN, []
    for line in lines_of(written):
        if line.get("step") != 4:
            del line["hash"]
            lines.append(chain.linked(head, line))
            head = lines[-1]["hash"]
    put(written, lines)
    assert read_chain(written / CHAIN).problems == [(4, "line 4: step 5 stands behind step 3")]


@pytest.mark.parametrize("step", [3, 6, 9])
def test_a_run_that_goes_on_writes_the_same_chain(written: Path, step: int) -> None:
    """From a checkpoint: lines behind it, its own among them, are written again, and no other twice."""
    before = (written / CHAIN).read_bytes()
    write(written, step, 10).close()
    assert (written / CHAIN).read_bytes() == before


def test_a_checkpoint_that_was_noted_behind_a_later_step_comes_again(written: Path) -> None:
    """As where training goes on from a checkpoint on the nodes, between two of the run folder."""
    before = lines_of(written)
    assert [line.get("step") for line in before[5:9]] == [6, None, 7, 8], "that of step 3 stands behind step 6"
    file = ChainFile(written, 5)
    assert lines_of(written) == before[:5]
    file.add_step(Step(6, f"{6:064x}", 0.5, 0.1 * 6))
    file.add_checkpoint(3, written / "3.json")
    file.close()
    assert lines_of(written) == before[:7]


def test_a_checkpoint_that_was_noted_at_a_stop_comes_again(tmp_path: Path) -> None:
    """It may be saved anew meanwhile, and what training writes now is what counts."""
    file = write(tmp_path, 0, 6)
    file.add_checkpoint(6, tmp_path / "6.json")
    file.close()
    ChainFile(tmp_path, 6).close()
    assert [line["checkpoint"] for line in lines_of(tmp_path) if "checkpoint" in line] == [3]


def test_lines_that_were_lost_are_told(written: Path, caplog: pytest.LogCaptureFixture) -> None:
    ChainFile(written, 12).close()
    assert "has no line of steps 11 to 12" in caplog.text


def test_a_checkpoint_is_named_once(written: Path) -> None:
    file = ChainFile(written, 10)
    for _ in range(2):
        file.add_checkpoint(9, written / "9.json")
    file.close()
    assert [line["checkpoint"] for line in lines_of(written) if "checkpoint" in line] == [3, 6, 9]


def test_what_an_earlier_attempt_still_writes_to_is_another_file(written: Path) -> None:
    before = (written / CHAIN).read_bytes()
    with (written / CHAIN).open("ab") as earlier:
        ChainFile(written, 6).close()
        earlier.write(b"a line of an attempt that is not dead")
    assert before.startswith((written / CHAIN).read_bytes())
    assert [line.get("step", "checkpoint") for line in lines_of(written)] == [1, 2, 3, 4, 5, 6, "checkpoint"]


@pytest.mark.parametrize("damaged", [0, 6])
def test_a_start_reads_what_it_drops_and_one_step_before(written: Path, damaged: int) -> None:
    """A long run goes on without reading all that it wrote: to check its links is for who verifies it."""
    lines = (written / CHAIN).read_bytes().splitlines(keepends=True)
    lines[damaged] = b"damaged\n"
    (written / CHAIN).write_bytes(b"".join(lines))
    if damaged:
        with pytest.raises(DamagedFileError, match=r"chain\.jsonl, line 7: not JSON"):
            ChainFile(written, 6)
    else:
        write(written, 6, 10).close()
        assert (written / CHAIN).read_bytes() == b"".join(lines)


def test_the_last_checkpoint_that_a_chain_tells_of(written: Path) -> None:
    assert chain.noted_checkpoint(written) == 6
    with (written / CHAIN).open("a") as file:
        file.write('{"checkpoint": "nine"}\n{"checkpoint')
    assert chain.noted_checkpoint(written) == 6
    write(written, 0, 2).close()
    assert chain.noted_checkpoint(written) is None
    assert chain.noted_checkpoint(written / "nowhere") is None


@pytest.mark.parametrize("end", [b"", b'\n{"step": 11, "samp', b"\n\n"])
def test_a_last_line_without_an_end_is_written_with_one(written: Path, end: bytes) -> None:
    before = (written / CHAIN).read_bytes()
    (written / CHAIN).write_bytes(before.removesuffix(b"\n") + end)
    write(written, 10, 11).close()
    assert (written / CHAIN).read_bytes().startswith(before)
    assert read_chain(written / CHAIN).problems == []
    assert list(read_chain(written / CHAIN).steps) == list(range(1, 12))


def test_what_was_put_among_the_last_lines_goes(written: Path) -> None:
    lines = lines_of(written)
    put(written, [*lines[:-1], {"note": "by hand"}, lines[-1], {"note": "again"}])
    ChainFile(written, 10).close()
    assert lines_of(written) == lines
