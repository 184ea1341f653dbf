"""Hold samples as they are read, and decode them for people and for programs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from plumbline.data.indexed import Int64s
from plumbline.data.streams import IGNORED, SampleSource, WindowStream
from plumbline.data.tokenizers import Decoder


class Place(NamedTuple):
    """Describe where a sample comes from."""

    source: str
    window: int
    has_answers: bool
    epoch: int | None = None


@dataclass(frozen=True)
class Sample:
    """Hold one sample without its padding: n input tokens, and the label after each."""

    source: str
    window: int
    tokens: list[int]
    """[n]"""
    labels: list[int]
    """[n]: -100 where there is no label."""
    begins: list[int]
    """Positions at which a document begins, including 0."""
    has_answers: bool
    """Whether it is an example of a task, whose labels are the answer."""
    number: int | None = None
    """Its number in the training order, or None for a corpus outside of a run."""
    epoch: int | None = None

    @property
    def documents(self) -> list[tuple[int, int]]:
        """Return the range of each document among the tokens."""
        return list(zip(self.begins, [*self.begins[1:], len(self.tokens)], strict=True))

    @property
    def prompt(self) -> list[int] | None:
        """Return the tokens up to the first answer, or None if it is not an example of a task."""
        if not self.has_answers:
            return None
        first = next((place for place, label in enumerate(self.labels) if label != IGNORED), len(self.labels) - 1)
        return self.tokens[: first + 1]

    def facts(self, decoder: Decoder | None) -> dict[str, Any]:
        """Return the facts for programs; texts are None without a tokenizer."""

        def text(ids: list[int]) -> str | None:
            return None if decoder is None else decoder(ids)

        documents = [{"begins": first, "text": text(self.tokens[first:stop])} for first, stop in self.documents]
        place = {"sample": self.number, "source": self.source, "epoch": self.epoch, "window": self.window}
        facts = {**place, "tokens": self.tokens, "documents": documents}
        if self.prompt is not None:
            answer = [label for label in self.labels if label != IGNORED]
            facts |= {"prompt": text(self.prompt), "answer": text(answer), "answer_tokens": answer}
        return facts


def decoders(sources: Mapping[str, SampleSource]) -> dict[str, Decoder | None]:
    """Return the decoder of each source, or None if its tokens are not text."""
    return {
        name: None if source.tokenizer_path is None else Decoder(source.tokenizer_path)
        for name, source in sources.items()
    }


def spread(name: str, stream: WindowStream, count: int, length: int) -> Iterator[Sample]:
    """Yield up to `count` samples spread over a split, in order."""
    available = stream.evaluation_windows(length)
    for number in range(min(count, available)):
        window = number * available // min(count, available)
        inputs, labels, begins = stream.read(window, length)
        place = Place(name, window, stream.has_answers)
        yield _sample(place, inputs.astype(np.int64), labels.astype(np.int64), begins.astype(np.int64))


def of_batch(batch: Mapping[str, Any], places: Iterator[Place]) -> Iterator[Sample]:
    """Yield the samples of a micro-batch of training, given the place of each row."""
    rows = (batch[name].numpy() for name in ("sample_index", "input_ids", "labels", "document_ids"))
    for number, tokens, labels, documents in zip(*rows, strict=True):
        begins = np.flatnonzero(np.diff(documents)) + 1
        yield _sample(next(places), tokens, labels, begins, int(number))


def _sample(place: Place, tokens: Int64s, labels: Int64s, begins: Int64s, number: int | None = None) -> Sample:
    """Return a sample without its padding: a last document without labels that follows other documents."""
    places = [0, *begins.tolist()]
    if begins.size and places[-1] >= len(tokens):  # the end of an example, where its padding would begin
        places.pop()
    elif begins.size and (labels[begins[-1] :] == IGNORED).all():
        tokens, labels = tokens[: begins[-1]], labels[: begins[-1]]
        places.pop()
    return Sample(
        source=place.source,
        window=place.window,
        tokens=tokens.tolist(),
        labels=labels.tolist(),
        begins=places,
        has_answers=place.has_answers,
        number=number,
        epoch=place.epoch,
    )
