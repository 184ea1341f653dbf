"""Train or adopt a tokenizer, and save it as a folder that transformers can load.

    byte             one token per UTF-8 byte, id = byte value, and <|endoftext|> = 256
    train-bpe:N      byte-level BPE of N tokens, trained on the corpus
    train-unigram:N  SentencePiece unigram of N tokens with byte fallback, trained on the corpus
    PATH, hf:NAME    any transformers tokenizer with an eos token, from a folder or from the Hugging Face hub

`build_tokenizer` writes the folder; `tokenizers.Encoder` reads it back.
"""

import io
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from plumbline.data.damage import read_object, reading
from plumbline.data.disk import naming_full_disk, number_of
from plumbline.data.hub import is_reachable
from plumbline.data.manifest import MANIFEST
from plumbline.data.tokenizers import CONFIG, TOKENIZER, byte_vocabulary, check_words, load_tokenizer

EOS = "<|endoftext|>"
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # the name before and since transformers 5
MODEL_CONFIG = "config.json"  # of a model, by which transformers finds the class of a tokenizer without its own
SMALLEST_BPE = 257  # 256 bytes and <|endoftext|>
PRINTABLE = "".join(map(chr, range(33, 127)))
SMALLEST_UNIGRAM = 256 + 2 + len(PRINTABLE) + 1  # bytes, <unk>, <|endoftext|>, printable ASCII and the space

LONGEST_LINE = 1 << 16
"""Bytes of a line beyond which SentencePiece silently skips it in training."""
TRIED_BYTES = 1 << 18
"""Most bytes of text on which an adopted tokenizer is tried."""
SAMPLE_BYTES = {"byte": 0, "train-bpe": 32 << 20, "train-unigram": 8 << 20}
"""Most bytes of text a tokenizer trains on. More hardly changes a vocabulary of ten thousand tokens, and
SentencePiece's time grows faster than the text (31 MB of Python source: 180 s, 8 MB: 30 s, on two busy cores)."""


def trained_size(spec: str) -> int | None:
    """Return the N of train-bpe:N or train-unigram:N, or None for a tokenizer that needs no training.

    Raises:
        ValueError: N is not a number, or too small to spell any text.
    """
    kind, _, number = spec.partition(":")
    smallest = {"train-bpe": SMALLEST_BPE, "train-unigram": SMALLEST_UNIGRAM}.get(kind)
    if smallest is None:
        return None
    if not number.isdecimal():
        raise ValueError(f"--tokenizer {spec}: expected {kind}:N with N a whole number, for example {kind}:8192")
    if len(number) > 7:
        raise ValueError(f"--tokenizer {spec}: at most {kind}:9999999; training takes hours from a million tokens on")
    if int(number) < smallest:
        raise ValueError(
            f"--tokenizer {spec}: the smallest vocabulary is {smallest}, since every byte needs a token; "
            f"use {kind}:{smallest} or more, or byte"
        )
    return int(number)


def sample_bytes(spec: str) -> int:
    """Return the most bytes of text that the tokenizer trains on, or is tried on."""
    return SAMPLE_BYTES.get(spec.partition(":")[0], TRIED_BYTES)


def check_tokenizer(spec: str) -> None:
    """Refuse a tokenizer that cannot be built, before any text is read.

    Raises:
        ValueError: the specification is malformed, or names a folder that does not exist.
    """
    if spec == "byte" or spec.startswith("hf:") or trained_size(spec) is not None:
        return
    if Path(spec).is_file():
        raise ValueError(
            f"--tokenizer {spec}: is a file; give the folder of a tokenizer that transformers saved, with its "
            "tokenizer.json (a model of SentencePiece alone does not say which class of transformers reads it)"
        )
    if not Path(spec).is_dir():
        raise ValueError(
            f"--tokenizer {spec}: no such folder;{_meant_by(spec)} known: byte, train-bpe:N, train-unigram:N, hf:NAME "
            "(hub), or a folder that holds tokenizer.json and tokenizer_config.json"
        )
    if not any((Path(spec) / name).is_file() for name in (TOKENIZER, CONFIG, MODEL_CONFIG, MANIFEST)):
        raise ValueError(
            f"--tokenizer {spec}: has none of {TOKENIZER}, {CONFIG} and {MODEL_CONFIG}, which say which class of "
            "transformers reads it; load it with that class, and save it with save_pretrained"
        )
    if (Path(spec) / MANIFEST).is_file():
        own = next((str(each) for each in Path(spec).glob("**/tokenizer") if each.is_dir()), "not there")
        raise ValueError(f"--tokenizer {spec}: is a corpus; its tokenizer is {own}")


def _meant_by(spec: str) -> str:
    """Return what was probably meant by a tokenizer that is not a folder: a kind without its prefix, or a hub name."""
    kind, _, size = spec.partition(":")
    if kind in ("bpe", "unigram") and size.isdecimal():
        return f" did you mean train-{spec}?"
    return f" of the hub it would be hf:{spec};" if re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", spec) else ""


def build_tokenizer(spec: str, sample: Iterable[str], folder: Path) -> None:
    """Make the tokenizer and save it.

    Args:
        spec: See the module's docstring.
        sample: Documents to train on; not read unless `trained_size(spec)`.
        folder: Created, with tokenizer.json and tokenizer_config.json.

    Raises:
        ValueError: the tokenizer cannot be trained to this size, or the one named cannot be used.
        ConnectionError: it is on the hub, and the hub cannot be reached.
    """
    folder.mkdir(parents=True)
    size = trained_size(spec)
    if size is not None:
        train = _train_bpe if spec.startswith("train-bpe") else _train_unigram
        _save(train(size - 1, sample), folder)
    elif spec == "byte":
        _save(_bytes_only(), folder)
    else:
        _adopt(spec, folder)


def _bytes_only() -> Tokenizer:
    """Build a byte-level BPE with no merges, its 256 tokens numbered by the byte they stand for."""
    return _byte_level(Tokenizer(models.BPE(vocab=byte_vocabulary(), merges=[])), use_regex=False)


def _train_bpe(size: int, sample: Iterable[str]) -> Tokenizer:
    tokenizer = _byte_level(Tokenizer(models.BPE()), use_regex=True)
    alphabet = list(byte_vocabulary())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def _byte_level(tokenizer: Tokenizer, use_regex: bool) -> Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _train_unigram(size: int, sample: Iterable[str]) -> Tokenizer:
    """Train with SentencePiece, then rebuild the same segmentation with the tokenizers library."""
    from sentencepiece import sentencepiece_model_pb2 as protocol  # needs protobuf, which nothing else here does

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(sample),
            model_writer=model,
            model_type="unigram",
            vocab_size=size,
            hard_vocab_limit=False,  # a small sample gives a smaller vocabulary instead of an error
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=LONGEST_LINE,
            required_chars=PRINTABLE,
            bos_id=-1,
            eos_id=-1,
            num_threads=16,  # the result depends on this number, so it must not follow the machine's
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(
            f"--tokenizer train-unigram:{size + 1}: sentencepiece cannot train it ({str(error).splitlines()[-1]}); "
            "try another size, more text, or train-bpe"
        ) from error
    pieces = protocol.ModelProto.FromString(model.getvalue()).pieces
    # SentencePiece never matches the names <unk> and <0x..> in text; tokenizers would. A very low score prevents it and
    # changes nothing else: the byte fallback goes by name, and all printable ASCII has pieces of its own.
    normal = protocol.ModelProto.SentencePiece.NORMAL
    vocabulary = [(piece.piece, piece.score if piece.type == normal else -1e6) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    # No piece holds a line break (training saw none), so lines can be segmented one by one. That is faster, and exact
    # where SentencePiece's 32-bit running score drifts over a long document.
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _lines(documents: Iterable[str]) -> Iterator[str]:
    """Yield the lines of documents; lines too long for SentencePiece are yielded in pieces."""
    characters = LONGEST_LINE // 4  # a character has at most 4 bytes
    for document in documents:
        for line in filter(None, document.split("\n")):
            if len(line.encode()) <= LONGEST_LINE:
                yield line
            else:
                yield from (line[start : start + characters] for start in range(0, len(line), characters))


def _save(tokenizer: Tokenizer, folder: Path) -> None:
    """Add the end-of-text token as the last id, and write what transformers needs."""
    tokenizer.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    with _errors_of_the_system():
        tokenizer.save(str(folder / TOKENIZER))
    config = {
        "tokenizer_class": GENERIC_CLASSES[0],  # every version of transformers knows it
        "bos_token": EOS,  # a text begins where another has ended
        "eos_token": EOS,
        "pad_token": EOS,  # runtimes and evaluation harnesses ask for one
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**9,  # the tokenizer sets no limit; the model does
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _adopt(spec: str, folder: Path) -> None:
    """Copy a transformers tokenizer from a folder or the hub."""
    if _is_generic(Path(spec)):
        load_tokenizer(Path(spec))  # so that an error names this file, not its copy
        # Byte for byte: loading and saving would rewrite tokenizer.json, and two corpora of one tokenizer would not
        # match.
        for name in (TOKENIZER, CONFIG):
            shutil.copyfile(Path(spec) / name, folder / name)
        return
    from transformers import AutoTokenizer  # slow to import, and only needed here

    name, is_of_hub = spec.removeprefix("hf:"), spec.startswith("hf:")
    here = not (is_of_hub and is_reachable())
    try:
        with reading(f"--tokenizer {spec}"):
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, local_files_only=here)
            check_words(tokenizer)
    except ValueError as error:
        if here and is_of_hub:
            raise ConnectionError(
                f"{error}; the hub cannot be reached: give a folder, or see to the network"
            ) from error
        raise
    if tokenizer.eos_token is None:
        raise ValueError(f"--tokenizer {spec}: it has no eos_token to end documents with; set one and save it again")
    with _errors_of_the_system():
        tokenizer.save_pretrained(folder)
    if not (folder / TOKENIZER).is_file():
        raise ValueError(f"--tokenizer {spec}: it has no fast version ({TOKENIZER}); convert it with transformers")


@contextmanager
def _errors_of_the_system() -> Iterator[None]:
    """Convert the tokenizers library's plain Exceptions that carry an OS error number in their text to OSError."""
    try:
        yield
    except Exception as error:
        number = number_of(error)
        if number is None:
            raise
        raise OSError(number, str(error)) from error


def _is_generic(folder: Path) -> bool:
    """Return whether tokenizer.json is complete: no model-specific class adds to it when transformers loads it."""
    if not ((folder / TOKENIZER).is_file() and (folder / CONFIG).is_file()):
        return False
    config = read_object(folder / CONFIG)
    return config.get("tokenizer_class") in GENERIC_CLASSES and config.get("eos_token") is not None


def tokenizer_folder(spec: str) -> Path:
    """Return a folder with a tokenizer that needs no training, byte-identical to that of a corpus prepared with it.

    Raises:
        ValueError: there is no such tokenizer, or it cannot be used.
        ConnectionError: it is on the hub, and the hub cannot be reached.
    """
    check_tokenizer(spec)
    return Path(spec) if _is_generic(Path(spec)) else Path(_adopted(spec).name) / "tokenizer"


@cache
def _adopted(spec: str) -> "TemporaryDirectory[str]":
    """Return a temporary folder, removed when this process ends, with the tokenizer in a folder of its own."""
    folder = TemporaryDirectory(prefix="tokenizer-")
    try:
        with naming_full_disk(folder.name, "set TMPDIR to another folder"):
            build_tokenizer(spec, [], Path(folder.name) / "tokenizer")
    except BaseException:
        folder.cleanup()  # explicitly, since the traceback of an error keeps a reference to it
        raise
    return folder
