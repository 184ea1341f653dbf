"""Resolve a configuration: fill in what its corpora, or the model that it starts from, decide.

Everything that is written is checked before the first corpus or model folder is looked at.
"""

from pathlib import Path
from typing import Any

from plumbline.data.config import DataConfig
from plumbline.data.corpus import corpora_beside, read_manifest
from plumbline.data.manifest import MANIFEST
from plumbline.data.paths import is_url
from plumbline.data.remote.fetch import RemoteError
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.parse import (
    check_written,
    parse_config,
    takes_shape_from_stock,
    with_whole_numbers,
)
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.config.stock import section_of


def resolve(values: dict[str, Any], source: str) -> Config:
    """Return the configuration that nested plain values describe, with nothing left open.

    A model section without a shape is taken from `train.initialize_from`, and `model.vocab_size` from the first
    training corpus or task; neither is looked at when the values are given.

    Args:
        values: sections of keys, as they were written.
        source: what to call them in errors.

    Raises:
        ConfigError: names every problem of what is written, or the corpus that is not there.
        ValueError: train.initialize_from is no model that a run can start from.
    """
    absent = {section for section in Config.model_fields if values.get(section, ...) is None}  # taken away by null
    values = with_whole_numbers({section: keys for section, keys in values.items() if section not in absent})
    check_written(values, source)
    model = values.get("model") or {}
    if takes_shape_from_stock(values):
        spec = values["train"]["initialize_from"]
        model, source = {**section_of(spec), **model}, f"{source}, with the model of {spec}"
    if model.get("vocab_size") is None:
        model = {**model, "vocab_size": vocab_size(DataConfig.model_validate(values["data"]))}
    return parse_config({**values, "model": model}, source)


def vocab_size(data: DataConfig) -> int:
    """Return the vocabulary size of the first training corpus or task.

    Raises:
        ConfigError: the corpus is not there, or does not say.
        RemoteError: it is at a URL, and the server does not answer.
    """
    first = data.train[0]
    if first.task is not None:
        return first.task.vocab_size
    try:
        return read_manifest(first.paths[0], data.cache).vocab_size
    except RemoteError:  # says why it cannot be had
        raise
    except (OSError, ValueError) as error:
        where = first.paths[0]
        is_there = is_url(where) or Path(where, MANIFEST).is_file()
        why = error if is_there else f"{corpora_beside(Path(where))}; prepare it (launcher/prepare.py)"
        raise ConfigError(
            f"data.train.0.path = {where}: holds no readable corpus.json, from which model.vocab_size is taken; {why}, "
            "or set model.vocab_size"
        ) from error
