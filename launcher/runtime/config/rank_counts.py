"""Check the number of ranks for `run.reproducible: any_ranks`; the schema checks the other keys for it."""

from collections.abc import Iterator

from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.schema import Config


def check_ranks(config: Config, ranks: int) -> None:
    """Refuse a number of ranks on which a run cannot be bit-identical to a run on one rank.

    Raises:
        ConfigError: names the number of ranks and those that fit.
    """
    data = config.data
    if config.run.reproducible is None:
        return
    sizes = [*(stage.global_batch_size for stage in data.batch_size_warmup), data.global_batch_size]
    fitting = list(_fitting(sizes, data.micro_batch_size))
    if not fitting:
        raise ConfigError(
            f"run.reproducible = any_ranks: data.micro_batch_size = {data.micro_batch_size} does not divide the "
            f"{' and '.join(map(str, sizes))} sequences of a step, so its micro-batches would depend on the number of "
            "ranks: set one that does"
        )
    if ranks not in fitting:
        raise ConfigError(
            f"run.reproducible = any_ranks: {ranks} ranks cannot share micro-batches of {data.micro_batch_size} "
            f"sequences as a power of two: use {' or '.join(map(str, fitting))} ranks, lower data.micro_batch_size "
            "before the run begins, or set run.reproducible=null"
        )


def _fitting(sizes: list[int], micro_batch: int) -> Iterator[int]:
    """Yield the powers of two that divide the micro-batches of every batch size."""
    ranks = 1
    while all(size % (micro_batch * ranks) == 0 for size in sizes):
        yield ranks
        ranks *= 2
