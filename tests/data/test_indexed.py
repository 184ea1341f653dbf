"""The token file format, against a reader and a writer that share no code with ours."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from plumbline.data import indexed
from plumbline.data.damage import DamagedFileError
from plumbline.data.indexed import IndexedWriter, open_indexed, token_dtype


def read_like_megatron(prefix: Path) -> list[list[int]]:
    """Megatron-LM's _IndexReader, spelled out with struct."""
    index, tokens = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    assert struct.unpack_from("<Q", index, 9) == (1,)
    letter, size = {8: ("H", 2), 4: ("i", 4)}[index[17]]
    sequences, indices = struct.unpack_from("<QQ", index, 18)
    lengths = struct.unpack_from(f"<{sequences}i", index, 34)
    pointers = struct.unpack_from(f"<{sequences}q", index, 34 + 4 * sequences)
    documents = struct.unpack_from(f"<{indices}q", index, 34 + 12 * sequences)
    assert len(index) == 34 + 12 * sequences + 8 * indices
    assert documents == tuple(range(sequences + 1))
    assert len(tokens) == size * sum(lengths)
    return [
        list(struct.unpack_from(f"<{length}{letter}", tokens, pointer))
        for length, pointer in zip(lengths, pointers, strict=True)
    ]


def write_like_megatron(prefix: Path, documents: list[list[list[int]]], code: int = 8, letter: str = "H") -> None:
    """Write documents of several sequences each, as Megatron-LM's preprocessing writes split sentences."""
    sequences = [sequence for document in documents for sequence in document]
    data = [struct.pack(f"<{len(sequence)}{letter}", *sequence) for sequence in sequences]
    Path(f"{prefix}.bin").write_bytes(b"".join(data))
    ends = np.cumsum([0, *map(len, data)]).tolist()
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<QQ", len(sequences), len(documents) + 1)
    index += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    index += struct.pack(f"<{len(sequences)}q", *ends[:-1])
    index += struct.pack(f"<{len(documents) + 1}q", *np.cumsum([0, *map(len, documents)]).tolist())
    Path(f"{prefix}.idx").write_bytes(index)


@pytest.mark.parametrize(("vocab_size", "largest"), [(65536, 65535), (65537, 65536)])
def test_megatron_reads_what_we_write(tmp_path: Path, vocab_size: int, largest: int) -> None:
    documents = [[1, 2, largest], [7], [0, 0]]
    with IndexedWriter(tmp_path / "a", token_dtype(vocab_size)) as writer:
        writer.add_documents(np.array([1, 2, largest, 7]), [3, 1])
        writer.add_documents(np.array([0, 0]), [2])
    assert read_like_megatron(tmp_path / "a") == documents
    assert (tmp_path / "a.bin").stat().st_size == 6 * (2 if largest == 65535 else 4)
    assert writer.files["a.bin"].size == (tmp_path / "a.bin").stat().st_size


@pytest.mark.parametrize(("code", "letter"), [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")])
def test_we_read_what_megatron_writes(tmp_path: Path, code: int, letter: str) -> None:
    write_like_megatron(tmp_path / "a", [[[1, 2], [3]], [[4, 5, 6]], [], [[7], [8]]], code, letter)
    opened = open_indexed(tmp_path / "a")
    assert opened.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert opened.num_documents == 4
    assert opened.document_starts(0, 8).tolist() == [3, 6, 6]  # the empty document starts where the next one does


def test_one_sequence_documents_start_where_the_index_says(tmp_path: Path) -> None:
    write_like_megatron(tmp_path / "a", [[[1, 2]], [[3]], [[4, 5, 6]]])
    opened = open_indexed(tmp_path / "a")
    assert opened.document_starts(0, 6).tolist() == [2, 3]
    assert opened.document_starts(2, 6).tolist() == [3]  # strictly after the first token asked for
    assert opened.document_starts(0, 3).tolist() == [2]  # and before the last


@pytest.mark.parametrize("block", [1, 2, 3, 100])
@pytest.mark.parametrize(("numbers", "expected"), [([0], True), ([0, 1, 2, 3], True), ([0, 1, 3, 4], False),
                                                   ([0, 1, 2, 2], False), ([0, 2], False)])  # fmt: skip
def test_an_index_is_looked_at_a_block_at_a_time(numbers: list[int], expected: bool, block: int) -> None:
    assert indexed._counts_by_one(np.array(numbers), block) is expected


def test_of_an_index_with_a_checksum_only_the_ends_are_read(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", np.dtype("<u2")) as writer:
        writer.add_documents(np.arange(10), [3, 5, 2])
    wrong = np.array([0, 2, 2, 3], "<i8").tobytes()
    change(tmp_path / "a.idx", lambda data: data[: -len(wrong)] + wrong)
    assert open_indexed(tmp_path / "a").first_bytes.tolist() == [0, 16, 16]
    assert open_indexed(tmp_path / "a", has_checksum=True).first_bytes.tolist() == [0, 6, 16]


def test_an_empty_corpus_opens(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", token_dtype(10)):
        pass
    assert open_indexed(tmp_path / "a").tokens.tolist() == []


def test_a_failed_writer_leaves_no_index(tmp_path: Path) -> None:
    def fail_halfway() -> None:
        with IndexedWriter(tmp_path / "a", token_dtype(10)) as writer:
            writer.add_documents(np.array([1]), [1])
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_halfway()
    assert not (tmp_path / "a.idx").exists()


def change(path: Path, edit: Callable[[bytes], bytes]) -> None:
    path.write_bytes(edit(path.read_bytes()))


@pytest.mark.parametrize(
    ("suffix", "edit", "message"),
    [
        ("bin", lambda data: data[:-1], r"a\.bin: 11 bytes, but a\.idx describes 12; .*truncated"),
        ("bin", lambda data: data + b"\0", r"a\.bin: 13 bytes, but a\.idx describes 12"),
        ("idx", lambda data: data[:-8], r"a\.idx: 94 bytes, but its header describes 102"),
        ("idx", lambda data: data[:20], r"a\.idx: 20 bytes, expected at least 34"),
        ("idx", lambda data: data[:0], r"a\.idx: starts with b'', expected b'MMIDIDX"),
        ("idx", lambda data: b"TNTIDX\x00\x00\x00" + data[9:], r"a\.idx: starts with b'TNTIDX"),
        ("idx", lambda data: data[:9] + b"\x02" + data[10:], r"a\.idx: format version 2, expected 1"),
        ("idx", lambda data: data[:17] + b"\x07" + data[18:], r"a\.idx: token type code 7"),
        ("idx", lambda data: data[:-8] + b"\x09" + data[-7:], r"a\.idx: document indices must run from 0 to .* 3"),
        (  # pointers of the first two sequences changed places
            "idx",
            lambda data: data[:46] + data[54:62] + data[46:54] + data[62:],
            r"a\.idx: sequence 0 of 2 tokens at byte 4 does not begin where the one before ends, byte 0",
        ),
        (  # and a length that is less than none
            "idx",
            lambda data: data[:38] + b"\xff\xff\xff\xff" + data[42:],
            r"a\.idx: sequence 1 of -1 tokens at byte 4 does not begin",
        ),
        (  # a document that begins beyond the next one
            "idx",
            lambda data: data[:78] + b"\x03" + data[79:],
            r"a\.idx: document 1 runs from sequence 3 to 2, which is before it; .*copy it again",
        ),
        ("idx", lambda data: data[:78] + b"\xff" * 8 + data[86:], r"a\.idx: document 0 runs from sequence 0 to -1"),
    ],
)
def test_damage_is_named(tmp_path: Path, suffix: str, edit: Callable[[bytes], bytes], message: str) -> None:
    write_like_megatron(tmp_path / "a", [[[1, 2]], [[3]], [[4, 5, 6]]])
    change(tmp_path / f"a.{suffix}", edit)
    with pytest.raises(DamagedFileError, match=message):
        open_indexed(tmp_path / "a")


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_missing_file_is_named(tmp_path: Path, suffix: str) -> None:
    write_like_megatron(tmp_path / "a", [[[1]]])
    (tmp_path / f"a.{suffix}").unlink()
    with pytest.raises(DamagedFileError, match=rf"a\.{suffix}: no such file"):
        open_indexed(tmp_path / "a")
