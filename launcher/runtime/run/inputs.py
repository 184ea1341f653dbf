"""Open and check what training reads, before any process group or GPU is used."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plumbline.data.corpus import Corpus
from plumbline.data.loader import TrainBatches, ValidationBatches
from plumbline.data.opening import evaluated_sources
from plumbline.data.streams import SampleSource, WindowStream
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.identity import differences
from plumbline.launcher.runtime.config.plan import last_step
from plumbline.launcher.runtime.config.rank_counts import check_ranks
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.ranks.collectives import gather_objects
from plumbline.launcher.runtime.ranks.world import World


@dataclass(frozen=True)
class Inputs:
    """Hold this rank's share of the training and held-out batches."""

    train: TrainBatches
    validation: dict[str, tuple[WindowStream, ValidationBatches]]
    evaluated: Mapping[str, SampleSource]
    """Sources of `validation`."""

    @property
    def fingerprints(self) -> dict[str, str]:
        """Return name -> fingerprint of every training corpus: with the seed, what fixes the order of samples."""
        return {name: corpus.fingerprint for name, corpus in self.train.corpora.items()}

    def check_sizes(self) -> None:
        """Compare the sizes of all files of all corpora with their manifests.

        Raises:
            UnlikeManifestError: one is missing, or has another size than its manifest says.
        """
        sources = {id(source): source for source in (*self.train.corpora.values(), *self.evaluated.values())}
        for source in sources.values():
            if isinstance(source, Corpus):
                source.check_sizes()


def open_inputs(config: Config, world: World) -> Inputs:
    """Open the corpora and check them against the model and the world; one rank has to call `Inputs.check_sizes`.

    Args:
        config: what to read, and for which model.
        world: this process among all.

    Raises:
        ValueError: a corpus is missing, damaged, too small or repeated too often; its vocabulary does not fit the
            model; the batch cannot be divided over the ranks; or the run must have the same bits on any number of
            ranks, which is impossible on this number.
    """
    data = config.data
    check_ranks(config, world.size)
    gpu, vocab_size = world.device.index, config.model.vocab_size
    train = TrainBatches(data, config.run.seed, world.rank, world.size, vocab_size, gpu)
    train.check_epochs(last_step(config))
    for name, corpus in train.corpora.items():
        if corpus.vocab_size is not None and corpus.vocab_size > config.model.vocab_size:
            stock = config.train.initialize_from
            raise ConfigError(
                f"model.vocab_size = {config.model.vocab_size} is smaller than the vocabulary of {name} "
                f"({corpus.vocab_size}): "
                + (
                    f"set {corpus.vocab_size} or more; if left out, it is that of the first of data.train"
                    if stock is None
                    else f"it is that of {stock}; prepare the corpus with the tokenizer of that model"
                )
            )
    evaluated = evaluated_sources(data, train.corpora)
    validation = {
        name: (
            source.held_out,
            ValidationBatches(
                source.held_out,
                data.sequence_length,
                data.micro_batch_size,
                config.train.eval_batches,
                world.rank,
                world.size,
                config.model.vocab_size,
            ),
        )
        for name, source in evaluated.items()
    }
    return Inputs(train, validation, evaluated)


View = tuple[Config, dict[str, str]]
"""What one rank read: the resolved configuration, and name -> fingerprint of the corpora."""


def check_agreement(config: Config, inputs: Inputs, world: World) -> None:
    """Refuse to train if ranks see different files; all ranks must call.

    Every rank resolves the configuration and opens the corpora by itself, so that a mistake is reported within seconds,
    before the ranks connect. Hosts may have different copies of a corpus, or a branch's parent may have saved since.

    Raises:
        ConfigError: names the first rank that differs from rank 0, and each difference.
    """
    difference = disagreement(gather_objects((config, inputs.fingerprints), world))
    if difference is not None:
        raise ConfigError(difference)


def disagreement(views: Sequence[View]) -> str | None:
    """Return a description of how the first rank that differs from rank 0 does so, or None if all agree."""
    config, fingerprints = views[0]
    for rank, (other, others) in enumerate(views):
        if (other, others) == views[0]:  # by far quicker than to list no differences of thousands of ranks
            continue
        lines = differences(config, other)
        lines += [
            f"fingerprint of {name}: {fingerprints.get(name)} -> {others.get(name)}"
            for name in sorted({*fingerprints, *others})
            if fingerprints.get(name) != others.get(name)
        ]
        if lines:
            return (
                f"rank {rank} does not see what rank 0 does; give all hosts the same files, and name a checkpoint "
                "rather than a run that still saves:\n  " + "\n  ".join(lines)
            )
    return None
