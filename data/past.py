"""Compare what two mixtures have drawn so far, even if corpora have moved since."""

from collections.abc import Iterator, Mapping

from plumbline.data.config import DataConfig, SourceConfig
from plumbline.data.loader import TrainBatches
from plumbline.data.missing import NoCorpusError
from plumbline.data.opening import open_source


def same_past(old: DataConfig, new: DataConfig, step: int, drawn: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Return whether two mixtures draw the same samples before step `step`, whatever they do afterwards.

    They may differ in later weights and limits, in sources that join later or were to, and in where the corpora lie.

    Args:
        old: The data section used until then.
        new: The data section from then on.
        step: The first step that is not compared.
        drawn: Name -> fingerprint of the sources of `old` as they were read, in their order.
        now: The same of `new`.

    Raises:
        ValueError: a source of `old` is gone that was drawn from, and none of `new` has its name and its tokens.
    """
    samples = new.batch_plan.samples_before(step)
    entered = entered_before(old, step, drawn)
    there = [source for name, source in zip(drawn, old.train, strict=True) if name in entered]
    old = old.model_copy(update={"train": there})
    old = old.model_copy(update={"train": list(_found_again(old, new, entered, now)), "cache": new.cache})
    histories = [_history(new, samples)]
    try:
        histories.append(_history(old, samples))
    except ValueError:  # its sources can no longer be read together
        return False
    return histories[0] == histories[1]


def entered_before(data: DataConfig, step: int, fingerprints: Mapping[str, str]) -> dict[str, str]:
    """Return the fingerprints, by name, of the sources on which what was drawn before step `step` depends.

    All others have had no weight until then, and no change of it, which would have begun the cycle anew.
    """
    samples = data.batch_plan.samples_before(step)
    return {
        name: fingerprint
        for (name, fingerprint), source in zip(fingerprints.items(), data.train, strict=True)
        if source.weight or any(first < samples for first, _ in source.changes(data.sequence_length))
    }


def _history(config: DataConfig, samples: int) -> list[tuple[int, list[tuple[str, int, int]]]]:
    """Return everything that the first samples depend on, see `Mixture.history`."""
    # Micro-batches of one sample fit every batch size of a warm-up on any number of ranks
    alone = config.model_copy(update={"micro_batch_size": 1})
    return TrainBatches(alone, seed=0).order.mixture.history(samples)


def _found_again(
    old: DataConfig, new: DataConfig, drawn: Mapping[str, str], now: Mapping[str, str]
) -> Iterator[SourceConfig]:
    """Yield the sources of `old`, each from the path where `new` has the same tokens under its name, else its own."""
    places = dict(zip(now, new.train, strict=True))
    for (name, fingerprint), source in zip(drawn.items(), old.train, strict=True):
        if now.get(name) == fingerprint:
            yield source.model_copy(update={"name": name, "path": places[name].path, "task": places[name].task})
            continue
        try:
            open_source(source, old.cache, check_sizes=False)
        except (ValueError, OSError) as error:
            where = ", ".join(source.paths) or source.label
            reason = error.problem if isinstance(error, NoCorpusError) else error
            raise ValueError(
                f"data.train: {name} ({where}), which was trained on, cannot be opened, and no source of that name has "
                f"its tokens: put it back, or link it there{renamed({name: fingerprint}, now)} ({reason})"
            ) from error
        yield source


def renamed(drawn: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return which sources only changed their name, and what would make them match those that were drawn."""
    names = {fingerprint: name for name, fingerprint in now.items()}
    return "".join(
        f"; {names[fingerprint]} has the tokens of {name}: give it name: {name}"
        for name, fingerprint in drawn.items()
        if name not in now and fingerprint in names
    )
