"""Resolve a configuration: fill in what its corpora, or the model that it starts from, determine.

All given values are checked before any corpus or model folder is read.
"""

from pathlib import Path
from typing import Any

from plumbline.data.config import DataConfig
from plumbline.data.corpus import corpora_beside, read_manifest
from plumbline.data.manifest import MANIFEST
from plumbline.data.paths import is_url
from plumbline.data.remote.fetch import RefusedError, RemoteError
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.parse import check_written, parse, takes_shape_from_stock, with_whole_numbers
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.config.stock import section_of


def resolve(values: dict[str, Any], source: str) -> Config:
    """Return the complete configuration that nested plain values describe.

    A model section without a shape is taken from `train.initialize_from`, and `model.vocab_size` from the first
    training corpus or task; neither is read if the values are given.

    Args:
        values: sections of keys, as written.
        source: name of their origin in errors.

    Raises:
        ConfigError: names every problem of the values, or the missing corpus.
        ValueError: train.initialize_from is not a model that a run can start from.
    """
    absent = {section for section in Config.model_fields if values.get(section, ...) is None}  # removed by null
    values = with_whole_numbers({section: keys for section, keys in values.items() if section not in absent})
    check_written(values, source)
    model = values.get("model") or {}
    if takes_shape_from_stock(values):
        spec = values["train"]["initialize_from"]
        model, source = {**section_of(spec), **model}, f"{source}, with the model of {spec}"
    if model.get("vocab_size") is None:
        model = {**model, "vocab_size": vocab_size(DataConfig.model_validate(values["data"]))}
    return parse(Config, {**values, "model": model}, source)


def vocab_size(data: DataConfig) -> int:
    """Return the vocabulary size of the first training corpus or task.

    Raises:
        ConfigError: the corpus is missing, or does not have it.
        RemoteError: the corpus is at a URL whose server does not answer, or refuses corpus.json.
    """
    first = data.train[0]
    if first.task is not None:
        return first.task.vocab_size
    try:
        return read_manifest(first.paths[0], data.cache).vocab_size
    except RefusedError as error:
        raise RefusedError(
            f"{error}; or set model.vocab_size, if {first.paths[0]} is pairs without corpus.json"
        ) from error
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
