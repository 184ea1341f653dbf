"""Prompts as they are written, text as it is drawn, and what is refused before a weight is read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from plumbline.data.tokenizer_making import build_tokenizer, tokenizer_folder
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.models.continuing import (
    Continuation,
    TextStream,
    Writer,
    alike,
    encode,
    read_prompts,
    text_after,
    tokens_of,
)
from plumbline.launcher.runtime.models.facts import ModelFacts, model_facts
from plumbline.launcher.runtime.models.open import LoadedModel, load_tokenizer, stock_reader
from plumbline.launcher.runtime.train import samples
from plumbline.model.sampling import GREEDY, Sampling
from plumbline.model.stock_inputs import CACHE
from tests.data.made import begins_texts

TEXT = "naïve café 😀 → 東京\tend\n\n  of «text» 😀😀"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers")
    for spec in ("byte", "train-bpe:300", "train-unigram:400"):
        build_tokenizer(spec, [TEXT * 40, "some other words to learn from " * 40], folder / spec)
    return folder


def tokenizer(folder: Path, spec: str) -> Any:
    return AutoTokenizer.from_pretrained(folder / spec)


@pytest.mark.parametrize("spec", ["byte", "train-bpe:300", "train-unigram:400"])
def test_a_stream_is_the_text_of_all_its_tokens(folder: Path, spec: str) -> None:
    reader = tokenizer(folder, spec)
    tokens = reader.encode(TEXT, add_special_tokens=False)
    stream = TextStream(reader, [])
    pieces = [stream.add(token) for token in tokens]
    assert "".join([*pieces, stream.rest()]) == reader.decode(tokens)
    assert not any("\ufffd" in piece for piece in pieces), "no half of a character"
    assert sum(map(bool, pieces)) > len(tokens) / 3, "it comes as it is drawn"


@pytest.mark.parametrize(("text", "expected"), [("ab", [257, 97, 98]), ("<s>ab", [257, 97, 98]), ("", [257])])
def test_a_prompt_begins_as_documents_of_its_tokenizer_do(tmp_path: Path, text: str, expected: list[int]) -> None:
    assert tokens_of(AutoTokenizer.from_pretrained(begins_texts(tmp_path / "begins")), text) == expected


@pytest.mark.parametrize(("text", "expected"), [("ab", [97, 98]), ("", [256])])
def test_a_prompt_of_a_tokenizer_that_begins_no_text(folder: Path, text: str, expected: list[int]) -> None:
    assert tokens_of(tokenizer(folder, "byte"), text) == expected


@pytest.mark.parametrize(("text", "expected"), [("ab", [256, 97, 98]), ("<|endoftext|>ab", [256, 97, 98]), ("", [256])])
def test_a_prompt_of_a_tokenizer_that_begins_texts_with_their_end(folder: Path, text: str, expected: list[int]) -> None:
    """As OPT's does."""
    reader = tokenizer(folder, "byte")
    reader.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    assert tokens_of(reader, text) == expected


def test_what_ends_in_half_a_character_is_given_at_the_end(folder: Path) -> None:
    stream = TextStream(tokenizer(folder, "byte"), [])
    assert [stream.add(byte) for byte in "a😀".encode()[:3]] == ["a", "", ""]
    assert stream.rest() == "\ufffd"


@pytest.mark.parametrize("prompt", ["", "の"])
@pytest.mark.parametrize("more", ["", "a"])
def test_half_a_character_spoils_none_before_it(folder: Path, prompt: str, more: str) -> None:
    """Byte fallback would decode the run of bytes as a whole."""
    reader = tokenizer(folder, "train-unigram:400")
    before, whole, after = (reader.encode(text, add_special_tokens=False) for text in (prompt, "漢字", more))
    tokens = [*whole[:-1], *after]
    assert "漢" not in reader.decode(tokens)
    stream = TextStream(reader, before)
    assert "".join([*map(stream.add, tokens), stream.rest()]) == f"漢\ufffd\ufffd{more}"
    assert text_after(reader, before, tokens) == f"漢\ufffd\ufffd{more}"
    assert text_after(reader, whole, tokens[:1]) == "\ufffd"


@pytest.mark.parametrize("half", [1, 2, 3])
def test_a_character_that_a_prompt_begins_is_given_whole(folder: Path, half: int) -> None:
    reader, character = tokenizer(folder, "byte"), "😀".encode()
    stream, prompt = TextStream(reader, [97, *character[:half]]), [97, *character[:half]]
    assert "".join(stream.add(byte) for byte in [*character[half:], 98]) == "😀b"
    assert text_after(reader, prompt, [*character[half:], 98]) == "😀b"
    assert text_after(reader, prompt, [98]) == "b", "what it does not become is not said again"


@pytest.fixture(scope="module")
def spaced() -> Any:
    """Return a tokenizer that decodes as Llama-2's and Mistral's do: the first space of all is not of the text."""
    pieces = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁Hello": 3, "▁wo": 4, "▁": 5}
    reader = Tokenizer(models.WordLevel(pieces, unk_token="<unk>"))
    reader.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    reader.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=reader, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


class Says(nn.Module):
    """Say one token, whatever was read."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self.config = Qwen3Config(vocab_size=6, max_position_embeddings=40)
        self.logits = nn.Parameter(torch.zeros(6).index_fill(0, torch.tensor([token]), 99.0))

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, 6))


def test_the_space_after_a_prompt_is_said(spaced: Any) -> None:
    model = LoadedModel(Says(4), Path("m"), None, None, None, None)
    writer = Writer(model, spaced, 3, GREEDY, think=None)
    facts = ModelFacts(Path("m"), 40, 6, None)
    hello, nothing = (encode(facts, spaced, text, 0, 3) for text in ("Hello", ""))
    *pieces, whole = writer.stream(hello)
    assert pieces == [" wo", " wo", " wo", ""]
    assert isinstance(whole, Continuation)
    assert [each.text for each in (whole, *writer.together([hello, nothing]))] == [" wo wo wo"] * 2 + ["wo wo wo"]
    assert text_after(spaced, [1, 3, 5], [2, 4]) == " wo"


def test_samples_of_a_run_keep_the_space_after_a_prompt(
    spaced: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer").mkdir()
    monkeypatch.setattr(samples, "load_model", lambda *_: LoadedModel(Says(4), tmp_path, None, None, None, None))
    monkeypatch.setattr(samples, "load_tokenizer", lambda _: spaced)
    config = SimpleNamespace(
        run=SimpleNamespace(folder=tmp_path, seed=0),
        train=SimpleNamespace(sample_prompts=["Hello"]),
        model=SimpleNamespace(max_position_embeddings=40),
    )
    samples.write_samples(cast("Config", config))
    assert (tmp_path / "samples.txt").read_text().startswith("=== 'Hello'\nHello wo wo")


class Counting:
    """Count how many tokens are decoded."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.most = inner, 0

    def decode(self, tokens: list[int], **options: Any) -> str:
        self.most = max(self.most, len(tokens))
        return str(self.inner.decode(tokens, **options))


def test_a_long_text_is_not_decoded_again_and_again(folder: Path) -> None:
    counting = Counting(tokenizer(folder, "byte"))
    stream = TextStream(counting, [])
    for byte in (TEXT * 20).encode():
        stream.add(byte)
    assert counting.most <= 2 * len("😀".encode())


def test_a_folder_without_its_tokenizer_reads_no_text(tmp_path: Path) -> None:
    """Of such a folder transformers makes a tokenizer that drops every prompt; an export of a task is one."""
    Qwen3Config(vocab_size=32).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no tokenizer, so text cannot be turned into tokens"):
        _ = model_facts(tmp_path).tokenizer
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(ValueError, match="it knows no word, since its vocabulary is missing"):
        load_tokenizer(model_facts(tmp_path).tokenizer)
    with pytest.raises(ValueError, match="it knows no word, since its vocabulary is missing"):
        tokenizer_folder(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        ("a.txt", "one\n\n two \r\nthree\u2028four", ["one", " two ", "three\u2028four"]),
        ("a.jsonl", '{"prompt": "one\\ntwo"}\n\n{"prompt": "", "id": 3}\n', ["one\ntwo", ""]),
    ],
)
def test_prompts_are_lines(tmp_path: Path, name: str, content: str, prompts: list[str]) -> None:
    (tmp_path / name).write_bytes(content.encode())
    assert read_prompts(str(tmp_path / name)) == prompts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\n\n", r"a\.txt: holds no prompt"),
        ("a.txt", b"\xff\xfe", r"a\.txt: is not UTF-8 text"),
        ("a.jsonl", b'{"prompt": "x"}\n{"text": "x"}', r"a\.jsonl:2: expected an object such as"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1: expected an object such as"),
        ("a.jsonl", b'["x"]', r"a\.jsonl:1: expected an object such as"),
        ("a.jsonl", b'{"prompt": 3}', r"a\.jsonl:1: prompt is no text but 3"),
    ],
)
def test_files_without_prompts_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"--prompts .*{message}"):
        read_prompts(str(tmp_path / name))


def test_a_prompt_must_fit_the_model(folder: Path) -> None:
    byte, facts = tokenizer(folder, "byte"), ModelFacts(Path("m"), 16, 257, None)
    assert encode(facts, byte, "", 0, 15).tokens == [256], "an empty prompt begins a document"
    assert encode(ModelFacts(Path("m"), None, 257, None), byte, "x", 0, 10**9).tokens == [120]
    with pytest.raises(ValueError, match=r"prompt 'abcdef': 6 prompt tokens \+ 11 new ones exceed"):
        encode(facts, byte, "abcdef", 0, 11)
    with pytest.raises(ValueError, match=r"has token 120, and m knows ids below 100 only"):
        encode(ModelFacts(Path("m"), 16, 100, None), byte, "ax", 0, 1)
    with pytest.raises(ValueError, match=r"launcher/eval\.py --task"):
        _ = facts.tokenizer


def test_batches_are_of_like_length(folder: Path) -> None:
    byte, facts = tokenizer(folder, "byte"), ModelFacts(Path("m"), 99, 257, None)
    prompts = [encode(facts, byte, "x" * length, 0, 1) for length in (9, 2, 8, 1, 3)]
    assert alike(prompts, 2) == [[3, 1], [4, 2], [0]]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Hugging Face folder of a model that was never ours."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=53, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        intermediate_size=40, max_position_embeddings=40, bos_token_id=None, eos_token_id=None, initializer_range=0.5,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("stock")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def test_facts_of_a_stock_folder_need_no_weights(stock: Path) -> None:
    (stock / "model.safetensors").rename(stock / "aside")
    try:
        facts = model_facts(stock)
    finally:
        (stock / "aside").rename(stock / "model.safetensors")
    assert (facts.context_length, facts.vocab_size, facts.tokenizer_path) == (40, 53, None)


@pytest.mark.parametrize("content", ["[]", "{", '{"model_type": "nothing"}'])
def test_a_configuration_that_cannot_be_read_is_one_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json: cannot be read"):
        model_facts(tmp_path)


class Forgetful(nn.Module):
    """Serve a stock model whose class keeps no cache."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=self.inner(input_ids=input_ids, use_cache=False).logits)


PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
SAMPLING, SEEDS = Sampling(temperature=1.2, top_k=30), [1, 2, 1]


def rows(model: LoadedModel, sampling: Sampling = SAMPLING) -> list[list[int]]:
    steps = list(model.continuations(PROMPTS, 9, sampling=sampling, seeds=SEEDS))
    return [[token for token in row if token is not None] for row in zip(*steps, strict=True)]


def opened(module: nn.Module) -> LoadedModel:
    return LoadedModel(module.double().eval(), Path("m"), None, None, None, None)


def test_a_stock_model_says_in_a_batch_and_without_a_cache_what_it_says_alone(stock: Path) -> None:
    module = Qwen3ForCausalLM.from_pretrained(stock)
    model = opened(module)
    said = rows(model)
    alone = [
        list(model.continuation(prompt, 9, sampling=SAMPLING, seed=seed))
        for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
    ]
    assert said == alone
    assert len({tuple(row) for row in said}) == 3
    assert rows(opened(Forgetful(module))) == said
    greedy = module.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert rows(model, GREEDY)[0] == greedy[0, 5:].tolist()


def test_a_stock_model_reads_a_prompt_once_and_keeps_its_precision(stock: Path) -> None:
    module = Qwen3ForCausalLM.from_pretrained(stock).bfloat16().eval()
    lengths: list[int] = []
    caches: list[Any] = []

    def note(_module: nn.Module, _arguments: Any, named: dict[str, Any], output: Any) -> None:
        lengths.append(named["input_ids"].size(1))
        assert output.logits.size(1) == 1, "logits of the last token only"
        caches.append(next(output[name] for name in CACHE if name in output))

    module.register_forward_hook(note, with_kwargs=True)
    read = stock_reader(module)
    with torch.no_grad():
        read(torch.tensor([[1, 2, 3, 4]]))
        read(torch.tensor([[5]]))
    assert lengths == [4, 1]
    assert {layer.keys.dtype for layer in caches[-1].layers} == {torch.bfloat16}


def test_a_stock_model_has_a_longest_context_as_ours_have(stock: Path) -> None:
    model = opened(Qwen3ForCausalLM.from_pretrained(stock))
    with pytest.raises(ValueError, match="5 prompt tokens \\+ 36 new ones exceed max_position_embeddings = 40"):
        list(model.continuation([1] * 5, 36, sampling=GREEDY))


@pytest.mark.parametrize("wrong", ['"word"', "[64]", "[" * 100_000 + "]" * 100_000], ids=["word", "list", "deep"])
def test_a_stranger_s_configuration_that_cannot_be_read_is_named(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "qwen3", "hidden_size": {wrong}}}')
    with pytest.raises(ValueError, match=r"config\.json: cannot be read: (.*'hidden_size' expected int|it is nested)"):
        model_facts(tmp_path)
