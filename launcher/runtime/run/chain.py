"""Write and read chain.jsonl, a hash chain: every line contains the hash of the line before it.

    {"step": 7, "samples": HEX, "loss": 3.25, "grad_norm": 0.5, "hash": HEX}     for every step, logged or not
    {"checkpoint": 5, "manifest": HEX, "hash": HEX}                              once training saves again, or ends

Anyone can check a run by this file. `hash` is the SHA-256 of the previous line's hash (64 zeros for the first line)
followed by the line without its own hash. So no line can be changed, removed or moved without rewriting all later
lines, and even then the last hash differs from the one that somebody may have recorded. `samples` is the sum modulo
2^256 of the SHA-256 of each sample of the global batch: its number, and everything in it that the model receives. It
does not depend on how the samples are distributed over ranks and micro-batches. `manifest` is the SHA-256 of the
checkpoint's manifest.json, which has the checksum of each of its files.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plumbline.data.disk import is_there
from plumbline.launcher.runtime.run.lines import Lines
from plumbline.launcher.runtime.system.files import read_json_lines, write_start_anew
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.system.tail import Line, lines_from_end, lines_since, texts_from_end

CHAIN = "chain.jsonl"
BEGIN = "0" * 64
"""The previous hash of the first line."""
FED = ("sample_index", "input_ids", "labels", "document_ids", "positions")
"""Tensors of a batch that are hashed; a sample is one row of each."""
LIMBS, BITS = 8, 32
"""A digest is summed over ranks as 8 numbers of 32 bits each; an int64 can hold the sum of 2^31 of these."""
MODULUS: int = 1 << (LIMBS * BITS)


# -- digests -----------------------------------------------------------------------------------------------------------


def digest_of(batches: Iterable[Mapping[str, Any]]) -> int:
    """Return the sum of the digests of all samples of some micro-batches, whose tensors are on the host."""
    total = 0
    for batch in batches:
        for sample in zip(*(batch[name].numpy() for name in FED), strict=True):
            digest = hashlib.sha256()
            for row in sample:
                digest.update(row)
            total += int.from_bytes(digest.digest(), "big")
    return total % MODULUS


def to_limbs(digest: int) -> list[int]:
    """Return a digest as LIMBS numbers of BITS bits that ranks can add up, the lowest bits first."""
    return [digest >> (place * BITS) & (2**BITS - 1) for place in range(LIMBS)]


def from_limbs(sums: Sequence[float]) -> int:
    """Return the sum of some digests, given the sums of their limbs."""
    return sum(int(limb) << (place * BITS) for place, limb in enumerate(sums)) % MODULUS


def in_hex(digest: int) -> str:
    """Return a digest in hexadecimal, as the chain stores it."""
    return f"{digest:0{LIMBS * BITS // 4}x}"


def manifest_hash(path: Path) -> str:
    """Return the hash of a manifest that the chain stores."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


# -- lines -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Hold the digest of a step's samples and the numbers that it reported."""

    step: int
    samples: str
    loss: float
    grad_norm: float


@dataclass
class Read:
    """Hold the contents of a chain and the problems found in it."""

    steps: dict[int, Step] = field(default_factory=dict)
    checkpoints: dict[int, str] = field(default_factory=dict)
    """Step -> hash of the manifest."""
    head: str = BEGIN
    """Hash of the last line."""
    problems: list[tuple[int, str]] = field(default_factory=list)
    """Step and description of each problem with a line or its hash; later lines are read all the same."""
    last: int = 0
    """Step of the last line that has one."""

    def add(self, number: int, entry: dict[str, Any]) -> None:
        """Read the next line and check its link.

        Args:
            number: number of the line, from 1.
            entry: its object, from which the hash is removed.
        """
        told = entry.pop("hash", None)
        if told != linked(self.head, entry)["hash"]:
            at = _position(entry)
            text = f"line {number}: its hash is not that of this line behind the one before"
            self.problems.append((self.last if at is None else at, text))
        self.head = str(told)
        try:
            if "checkpoint" in entry:
                self.checkpoints[int(entry["checkpoint"])] = str(entry["manifest"])
                return
            its = Step(int(entry["step"]), str(entry["samples"]), float(entry["loss"]), float(entry["grad_norm"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            text = f"line {number}: neither a step nor a checkpoint ({type(error).__name__} {error})"
            self.problems.append((self.last, text))
            return
        if self.steps and its.step != self.last + 1:
            self.problems.append((self.last + 1, f"line {number}: step {its.step} stands behind step {self.last}"))
        self.steps[its.step], self.last = its, its.step


def linked(before: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with its hash added, given the hash `before` of the previous line."""
    text = json.dumps(entry)
    return {**entry, "hash": hashlib.sha256(f"{before}{text}".encode()).hexdigest()}


def read_chain(path: Path) -> Read:
    """Read a chain and check its hashes.

    Raises:
        DamagedFileError: a line is not a JSON object.
        OSError: the file cannot be read.
    """
    found = Read()
    for number, entry in read_json_lines(path):
        found.add(number, entry)
    return found


def noted_checkpoint(run: Path) -> int | None:
    """Return the step of the last checkpoint in a run's chain, or None if it has none that can be read."""
    with suppress(FileNotFoundError, IsADirectoryError):
        for _, text in texts_from_end(run / CHAIN):
            if (noted := _checkpoint_in(text)) is not None:
                return noted
    return None


def _checkpoint_in(text: bytes) -> int | None:
    """Return the step of the checkpoint in a line, or None if the line is of a step or cannot be read."""
    with suppress(ValueError, RecursionError):
        entry = json.loads(text) if b'"checkpoint"' in text else {}  # most lines are steps, and there may be millions
        at = entry.get("checkpoint") if isinstance(entry, dict) else None
        return at if type(at) is int else None
    return None


class ChainFile:
    """Append to the chain of a run resumed at `step`; lines of later steps are removed first.

    Args:
        folder: the run folder.
        step: step from which training (re)starts.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / CHAIN
        self._head, self._noted = BEGIN, 0
        if is_there(self.path):
            self._keep(step)
        self._lines = Lines(self.path)

    def _keep(self, step: int) -> None:
        """Remove the lines that training will write again when it resumes at `step`, and find where to continue.

        The line of a checkpoint follows that of the step at which training saved the next checkpoint. So the lines of
        earlier checkpoints are kept, and the line of the checkpoint at `step` itself will be written again.
        """
        before, lines = lines_since(self.path, step, _step_in)
        kept = [line.text + b"\n" for line in _belonging(lines, step)]
        # A new file, because an earlier attempt that is still alive may write to this one
        write_start_anew(self.path, before, b"".join(kept))
        last = 0
        for line in lines_from_end(self.path):
            if self._head == BEGIN:
                self._head = str(line.item.get("hash", BEGIN))
            if (its := _step_in(line)) is not None:
                last = its
                break
        self._noted = noted_checkpoint(self.path.parent) or 0
        if last < step:
            LOG.warning(f"{self.path} has no line of steps {last + 1} to {step}: they were lost with their process")

    def add_step(self, step: Step) -> None:
        """Write the line of a step."""
        self._add(vars(step))

    def add_checkpoint(self, step: int, manifest: Path) -> None:
        """Write the line of a checkpoint, unless the chain has it already."""
        if step > self._noted:
            self._add({"checkpoint": step, "manifest": manifest_hash(manifest)})
            self._noted = step

    def _add(self, entry: Mapping[str, Any]) -> None:
        line = linked(self._head, entry)
        self._head = line["hash"]
        self._lines.add(json.dumps(line))

    def close(self) -> None:
        """Write the lines that waited for free disk space, and close the file."""
        self._lines.close()


def _belonging(lines: Iterable[Line], step: int) -> Iterator[Line]:
    """Yield the lines to keep when a run resumes at `step`.

    If training resumes from a checkpoint on the nodes, the line of an earlier checkpoint may follow that of a step
    after `step`. Its hash depends on that step, so it is dropped, and will be written again.
    """
    at = 0
    for line in lines:
        at = line.item["step"] if _step_in(line) is not None else at
        if at <= step and _is_before(line.item, step):
            yield line


def _is_before(entry: Mapping[str, Any], step: int) -> bool:
    """Return whether a line is one to keep when a run resumes at `step`."""
    at = _position(entry)
    return "hash" in entry and at is not None and at < step + ("step" in entry)


def _step_in(line: Line) -> int | None:
    its = line.item.get("step")
    return its if type(its) is int else None


def _position(entry: Mapping[str, Any]) -> int | None:
    """Return the step of a line or of its checkpoint, or None if it has neither."""
    at = entry.get("step", entry.get("checkpoint"))
    return at if type(at) is int else None
