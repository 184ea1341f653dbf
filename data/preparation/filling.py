"""Fill the folder of a corpus: survey every unit, build the tokenizer, tokenize the pieces, assemble the shards.

    units -> survey (count, split, sample, duplicates) -> tokenizer -> pieces on all cores -> shards

Each step skips what a killed earlier run has already left in the folder.
"""

import logging
import math
import shutil
from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt

from plumbline.data.disk import sync
from plumbline.data.heldout import HeldOut, Sample, UInt64s, choose
from plumbline.data.indexed import Int64s
from plumbline.data.inputs.records import BINARY, NOT_UTF8, Unit
from plumbline.data.preparation.duplicates import check_memory, first_ones, key_count
from plumbline.data.preparation.encoding import (
    CHANGED,
    SPLITS,
    EncodingJob,
    Texts,
    encode_long_part,
    encode_texts,
    encode_unit,
)
from plumbline.data.preparation.manifest import WORK
from plumbline.data.preparation.pieces import Piece, Plan
from plumbline.data.preparation.request import Request
from plumbline.data.preparation.shards import Totals, finished_shard, write_shard
from plumbline.data.preparation.survey import EXAMPLES, PIECE_BYTES, SurveyJob, sample_entries, survey_unit
from plumbline.data.preparation.surveyed import Surveyed
from plumbline.data.preparation.work import Work
from plumbline.data.preparation.workers import Call, Workers
from plumbline.data.progress import Progress
from plumbline.data.sizes import counted, in_units
from plumbline.data.sources import Listed, printable
from plumbline.data.tokenizer_making import build_tokenizer, sample_bytes, trained_size
from plumbline.data.tokenizers import Encoder

LOG = logging.getLogger(__name__)
TRIED_CHARACTERS = 1 << 14
"""Most characters of each text on which an adopted tokenizer is tried."""
LOST = 0.01
"""Share of texts, or of their bytes, that are not UTF-8, at which we warn."""
FEED_BELOW = 4
"""Tasks per process below which an input that cannot be split is read here and tokenized by all processes."""

ChooseHeldOut = Callable[[Iterator[tuple[UInt64s, UInt64s]]], HeldOut]


@dataclass(frozen=True)
class Filled:
    """Describe the filled folder."""

    totals: Totals
    frequencies: Int64s
    """[train and validation, vocab_size]: how often each token occurs."""
    held_out: HeldOut
    skipped: dict[str, int]
    bad: list[str]
    encoder: Encoder


def fill(
    request: Request,
    listed: Listed,
    folder: Path,
    name_pair: Callable[[str, int], str],
    decide: ChooseHeldOut | None = None,
) -> Filled:
    """Write all token files, and the tokenizer if it is missing.

    Args:
        request: What to make of them.
        listed: The sources to read.
        folder: The folder to fill; anything already in it is from the same request.
        name_pair: Returns the name of a pair from the split and the number of the shard.
        decide: Chooses what is held out from the documents' places and sizes; None uses the request's fraction.

    Raises:
        ValueError: the request cannot be met.
        OSError: the disk is full, or a file cannot be read or written.
    """
    work = Work(folder / WORK, key_count(request.deduplicate))
    trained = trained_size(request.tokenizer) is not None
    if not trained:
        _build_tokenizer(request, work, [])  # first, to fail before all text is read
    with Workers(request.workers) as workers:
        surveyed = _survey(request, listed, work, workers)
        _check_any(surveyed)
        _warn_of_empty_sources(request, surveyed)
        _warn_of_what_is_left_out(surveyed)
        kept = _kept(request, work, surveyed)
        parts = _places_and_sizes(work, surveyed, kept)
        held_out = decide(parts) if decide else choose(parts, request.validation_fraction)
        LOG.info(_describe(held_out, surveyed.skipped))
        if trained:
            _build_tokenizer(request, work, _training_texts(surveyed, held_out, kept))
        encoder = Encoder(work.tokenizer, request.tokenizer)
        _warn_of_what_is_lost(request, surveyed, encoder)
        if not (work.folder / "pieces").is_dir():  # else an earlier run has already used part of the space
            _check_space(request, held_out, encoder.dtype.itemsize, folder)
        plan = Plan(work, surveyed.units, held_out, request.shard_bytes, surveyed.first_documents, kept)
        totals, frequencies = _Encoding(request, plan, encoder, workers, surveyed.tasks).write(folder, name_pair)
    if sum(counts.source_bytes for counts in totals.counts.values()) != held_out.source_bytes:
        raise ValueError(CHANGED)
    return Filled(totals, frequencies, held_out, dict(surveyed.skipped), surveyed.bad, encoder)


def _survey(request: Request, listed: Listed, work: Work, workers: Workers) -> Surveyed:
    """Survey all units that an earlier run has not surveyed, and return the findings for all units.

    Raises:
        ValueError: a source names no file, changes meanwhile, or holds a bad record that may not be skipped.
    """
    units = list(listed.units())
    for warning in listed.warnings():
        LOG.warning(warning)
    trained = trained_size(request.tokenizer) is not None
    wanted = 0 if trained and work.tokenizer.is_dir() else sample_bytes(request.tokenizer)
    found = Surveyed(units, Sample(wanted))
    job = SurveyJob(
        request.sources.reading,
        work,
        request.seed,
        request.validation_fraction,
        wanted,
        request.deduplicate,
        request.skip_bad,
        PIECE_BYTES,
    )
    done = {number for number in range(len(units)) if work.facts(number)}
    if done:
        LOG.info(f"going on with what an earlier run left: {len(done)} of {len(units)} inputs need not be read again")
    with closing(Progress("reading", None)) as progress:
        for number in workers.in_order(_survey_calls(job, found, done)):
            facts = work.facts(number)
            if facts is None:
                raise ValueError(CHANGED)
            found.add(units[number], facts, sample_entries(work, number))
            progress.update(facts.source_bytes)
    _warn_of_separator(request.sources.reading.document_separator, units, found.records)
    return found


def _survey_calls(job: SurveyJob, found: Surveyed, done: Container[int]) -> Iterator[tuple[int, Call | None]]:
    """Yield the number of each unit with the call that surveys it, or None if it is done."""
    for number, unit in enumerate(found.units):
        # The bound at this moment: the findings so far tell for what the sample has no room left
        call = Call(survey_unit, (job, number, unit, found.sample.bound))
        yield number, None if number in done else call


def _warn_of_separator(separator: str | None, units: list[Unit], records: Counter[tuple[str, ...]]) -> None:
    """Warn if the separator cuts no file."""
    texts = [unit.names for unit in units if unit.format.is_text]
    files = sum(map(len, texts))
    if separator is not None and files and sum(records[names] for names in texts) == files:
        LOG.warning(f"--document-separator {separator!r} stands in none of {files:,} files of text")


def _warn_of_what_is_left_out(found: Surveyed) -> None:
    """Warn if many files were left out because they are binary or in an unsupported encoding."""
    lost = found.skipped[NOT_UTF8] + found.skipped[BINARY]
    text = f"{lost:,} of {found.documents + lost:,} texts are not UTF-8 or binary, and left out"
    total = found.source_bytes + found.lost.size
    if found.lost.size > LOST * total:
        share = f"{found.lost.size:,} of {total:,} bytes"
        LOG.warning(f"{text}, files of {share}; the largest: {printable(found.lost.problem)}")
    elif lost > LOST * (found.documents + lost):
        LOG.warning(f"{text}; the first: {found.bad[0]}")


def _warn_of_what_is_lost(request: Request, surveyed: Surveyed, encoder: Encoder) -> None:
    """Warn if decoding does not restore the texts: their bytes still count in bits per byte."""
    if trained_size(request.tokenizer):
        return  # these restore every text
    texts = [text[:TRIED_CHARACTERS] for _, _, _, text in surveyed.sample.entries()]
    changed = [found for found in map(encoder.what_changes, texts) if found]
    if changed:
        LOG.warning(
            f"--tokenizer {request.tokenizer}: of {len(texts):,} texts that it was tried on {len(changed):,} come "
            f"back changed ({changed[0]}): what is lost is not trained on, and bits per byte, which count it, do not "
            "compare with those of other tokenizers"
        )


def _check_any(surveyed: Surveyed) -> None:
    if not surveyed.documents:
        first = f"; the first: {surveyed.bad[0]}" if surveyed.bad else ""
        raise ValueError(
            "no document to read: there is none in any source (--source, --append, --text)"
            f"{_left_out(surveyed.skipped)}{first}"
        )


def _warn_of_empty_sources(request: Request, surveyed: Surveyed) -> None:
    """Warn of sources without documents: often their files are incomplete."""
    empty = [number for number in range(len(request.sources.specs)) if not surveyed.documents_of[number]]
    if empty:
        names = ", ".join(request.sources.names[number] for number in empty[:EXAMPLES])
        problem = surveyed.first_bad.get(empty[0], "there is nothing in it")
        count = f"{len(empty)} of {len(request.sources.specs)} sources"
        LOG.warning(f"{count} hold no document to read: {names}; the first: {problem}")


def _kept(request: Request, work: Work, surveyed: Surveyed) -> npt.NDArray[np.bool_] | None:
    """Return a flag for every document: whether it is part of the corpus; or None if nothing is left out."""
    if request.deduplicate is None:
        return None
    check_memory(surveyed.documents, request.deduplicate)
    units = range(len(surveyed.units))
    # Copied, else the file of every unit would stay open until the last one is read
    kept = first_ones(lambda column: (np.array(work.documents(unit)["keys"][:, column]) for unit in units), work.keys)
    if removed := len(kept) - int(kept.sum()):
        surveyed.skipped["duplicate" if request.deduplicate == "exact" else "near duplicate"] = removed
    return kept


def _places_and_sizes(
    work: Work, surveyed: Surveyed, kept: npt.NDArray[np.bool_] | None
) -> Iterator[tuple[UInt64s, UInt64s]]:
    for unit, first in enumerate(surveyed.first_documents):
        rows = work.documents(unit)
        if kept is not None:
            rows = rows[kept[first : first + len(rows)]]
        yield rows["place"], rows["size"]


def _describe(held_out: HeldOut, skipped: Counter[str]) -> str:
    whole = held_out.documents == 1 or held_out.cut_above == math.inf
    cut = "" if whole else f"; of any of more than {held_out.cut_above:,.0f} bytes the end is held out"
    text = f"{counted(held_out.documents, 'document')}, {in_units(held_out.source_bytes)} of text"
    return f"source: {text}{_left_out(skipped)}{cut}"


def _left_out(skipped: Counter[str]) -> str:
    return "".join(f", {count:,} left out ({reason})" for reason, count in sorted(skipped.items()))


def _training_texts(surveyed: Surveyed, held_out: HeldOut, kept: npt.NDArray[np.bool_] | None) -> list[str]:
    def is_kept(number: int) -> bool:
        unit, index = number >> 40, number & (1 << 40) - 1
        return kept is None or bool(kept[surveyed.first_documents[unit] + index])

    return surveyed.sample.training_texts(held_out, is_kept)


def _build_tokenizer(request: Request, work: Work, sample: list[str]) -> None:
    if work.tokenizer.is_dir():
        return
    size = trained_size(request.tokenizer)
    if size:
        text = sum(len(document.encode()) for document in sample)
        LOG.info(f"tokenizer: training {request.tokenizer} on {counted(len(sample), 'document')}, {in_units(text)}")
    draft = work.folder / "tokenizer"
    shutil.rmtree(draft, ignore_errors=True)
    build_tokenizer(request.tokenizer, sample, draft)
    actual = Encoder(draft, request.tokenizer).vocab_size
    if size and actual < size:
        LOG.info(f"tokenizer: the text supports {actual:,} tokens only, fewer than the {size:,} asked for")
    for path in draft.rglob("*"):
        sync(path)
    draft.replace(work.tokenizer)


def _check_space(request: Request, held_out: HeldOut, token_bytes: int, folder: Path) -> None:
    """Refuse early what cannot fit on the disk: exact for byte tokens, else assuming the usual four bytes per token.

    The tokens of a shard exist twice until it is finished.
    """
    text = held_out.source_bytes + min(held_out.source_bytes, request.shard_bytes or held_out.source_bytes)
    text_per_token = 1 if request.tokenizer == "byte" else 4
    needed = text // text_per_token * token_bytes + held_out.documents * (token_bytes + 20)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"--output {request.output}: needs about {in_units(needed)} and the device has {in_units(free)} free; "
            "free some space, or choose another place"
        )


class _Encoding:
    """Tokenize the planned pieces that an earlier run has not tokenized."""

    def __init__(self, request: Request, plan: Plan, encoder: Encoder, workers: Workers, tasks: int) -> None:
        self._request = request
        self._plan = plan
        self._encoder = encoder
        self._workers = workers
        self._feeds = tasks < FEED_BELOW * workers.count and workers.count > 1
        self._job = EncodingJob(request.sources.reading, plan.work, request.tokenizer, plan.held_out)

    def write(self, folder: Path, name_pair: Callable[[str, int], str]) -> tuple[Totals, Int64s]:
        """Write the unfinished shards, and return the totals of all shards."""
        work, specs = self._plan.work, self._request.sources.names
        with closing(Progress("tokenizing", self._plan.held_out.source_bytes)) as progress:

            def pieces(done: Iterator[Piece]) -> Iterator[tuple[Piece, str]]:
                for piece in done:
                    yield piece, specs[self._plan.units[piece.unit].source]
                    progress.update(piece.source_bytes)

            done = self._workers.in_order(self._calls(folder))
            flat = (piece for task in done for piece in task)
            for shard, of_shard in groupby(flat, key=lambda piece: piece.shard):
                names = {split: name_pair(split, shard) for split in SPLITS}
                write_shard(folder, work, self._encoder, shard, names, pieces(of_shard))
                shutil.rmtree(work.piece(shard, 0, 0).parent)
        return self._collect(folder)

    def _collect(self, folder: Path) -> tuple[Totals, Int64s]:
        totals = Totals()
        frequencies = np.zeros((2, self._encoder.vocab_size), np.int64)
        shard = 0
        while found := finished_shard(folder, self._plan.work, shard):
            totals.add(found[0])
            frequencies += found[1]
            shard += 1
        return totals, frequencies

    def _calls(self, folder: Path) -> Iterator[tuple[list[Piece], Call | None]]:
        """Yield the pieces of unfinished shards, grouped by the position from which they are read."""
        work = self._plan.work
        unfinished = (
            piece
            for shard, pieces in groupby(self._plan.pieces(), key=lambda piece: piece.shard)
            if finished_shard(folder, work, shard) is None
            for piece in pieces
        )
        for _, group in groupby(unfinished, key=lambda piece: (piece.unit, piece.at, piece.long)):
            pieces = list(group)
            missing = [piece for piece in pieces if not work.piece(piece.shard, piece.unit, piece.number).is_file()]
            if len(missing) > 1 and self._feeds:
                yield from self._fed(pieces, missing)
            elif missing:
                yield pieces, self._call(missing)
            else:
                yield pieces, None

    def _call(self, missing: list[Piece]) -> Call:
        unit = self._plan.units[missing[0].unit]
        if missing[0].long:
            return Call(encode_long_part, (self._job, unit, missing[0]))
        return Call(encode_unit, (self._job, unit, [(piece, self._flags(piece)) for piece in missing]))

    def _fed(self, pieces: list[Piece], missing: list[Piece]) -> Iterator[tuple[list[Piece], Call | None]]:
        """Read texts in this process, sequentially, for several processes to tokenize."""
        texts = Texts(self._request.sources.reading, self._plan.units[pieces[0].unit], pieces[0])
        wanted = set(missing)
        for piece in pieces:
            call = None
            if piece in wanted:
                call = Call(encode_texts, (self._job, piece, self._flags(piece), list(texts.of(piece))))
            yield [piece], call

    def _flags(self, piece: Piece) -> npt.NDArray[np.bool_]:
        return self._plan.is_kept(piece.unit, piece.first, piece.last)
