"""What training reads, opened and checked before any process group or GPU is used."""

from dataclasses import dataclass

from plumbline.data.loader import TrainBatches, ValidationBatches, validation_splits
from plumbline.data.streams import WindowStream
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.system.world import World


@dataclass(frozen=True)
class Inputs:
    """This rank's share of the training and held-out batches."""

    train: TrainBatches
    validation: dict[str, tuple[WindowStream, ValidationBatches]]

    @property
    def fingerprints(self) -> dict[str, str]:
        """Name -> fingerprint of every training corpus: with the seed, what fixes the order of samples."""
        return {name: corpus.fingerprint for name, corpus in self.train.corpora.items()}


def open_inputs(config: Config, world: World) -> Inputs:
    """Open the corpora and check them against the model and the world.

    Raises:
        ValueError: missing, damaged or too small corpus, vocabulary that does not fit, batch that does not divide.
    """
    data = config.data
    train = TrainBatches(data, config.run.seed, world.rank, world.size)
    for name, corpus in train.corpora.items():
        if corpus.vocab_size is not None and corpus.vocab_size > config.model.vocab_size:
            raise ConfigError(
                f"model.vocab_size = {config.model.vocab_size} is smaller than the vocabulary of {name} "
                f"({corpus.vocab_size}): leave it out to take the corpus's, or set a larger one"
            )
    validation = {
        name: (
            split,
            ValidationBatches(
                split, data.sequence_length, data.micro_batch_size, config.train.eval_batches, world.rank, world.size
            ),
        )
        for name, split in validation_splits(data).items()
    }
    return Inputs(train, validation)
