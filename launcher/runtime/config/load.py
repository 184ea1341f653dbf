"""Read a configuration, complete it, and save it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.resolve import resolve
from plumbline.launcher.runtime.config.run_files import CONFIG
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.config.written import read_values
from plumbline.launcher.runtime.config.yaml_files import escape
from plumbline.launcher.runtime.system.files import write_whole

ChooseStage = Callable[[Mapping[int, Config]], int]
"""Returns one of the keys of a mapping ZeRO stage -> the configuration with it."""
AUTO = "auto"
BY_PREFERENCE = (1, 2, 3, 0)
"""ZeRO stages that `auto` may become. Stage 0 is the last: it needs the most memory, and differs in bf16."""


def load_config(path: Path, overrides: list[str], choose_stage: ChooseStage | None = None) -> Config:
    """Read a YAML file, apply its `extends:` chain and the overrides, and fill in what corpora and models determine.

    Args:
        path: the YAML file.
        overrides: `section.key=value` strings, applied in order; values are parsed as YAML.
        choose_stage: chooses the stage if deepspeed.zero_stage is `auto`; passed by callers that know the devices.

    Raises:
        ConfigError: unreadable file, bad YAML, unknown keys, wrong types or values; one line for each problem.
    """
    values, source = read_values(path, overrides), f"{path} with its overrides" if overrides else str(path)
    if not _is_open(values):
        return resolve(values, source)
    if choose_stage is None:
        raise ConfigError(
            f"{path}: deepspeed.zero_stage = {AUTO} is for one run, whose devices are known when it starts: give a "
            "number from 0 to 3 here"
        )
    candidates = _by_stage(values, source)
    return candidates[choose_stage(candidates)]


def config_in(folder: Path) -> Config:
    """Return the resolved configuration in a run folder or a checkpoint.

    Raises:
        ConfigError: unreadable file, or a version of the program that knows other keys wrote it.
    """
    return load_config(folder / CONFIG, [])


def leaves_stage_open(path: Path, overrides: list[str]) -> bool:
    """Return whether a YAML file and overrides leave deepspeed.zero_stage to the devices that the run starts on.

    Raises:
        ConfigError: unreadable file, bad YAML, or an invalid override.
    """
    return _is_open(read_values(path, overrides))


def _is_open(values: Mapping[str, Any]) -> bool:
    section = values.get("deepspeed")
    return isinstance(section, dict) and section.get("zero_stage") == AUTO


def _by_stage(values: dict[str, Any], source: str) -> dict[int, Config]:
    """Return the configuration with each ZeRO stage that it permits; stage 0 only if it permits no other.

    Raises:
        ConfigError: it permits none; lists the problems of the first.
    """
    found: dict[int, Config] = {}
    refusals: list[ConfigError] = []
    for stage in BY_PREFERENCE:
        if stage == 0 and found:
            break
        try:
            found[stage] = resolve({**values, "deepspeed": {**values["deepspeed"], "zero_stage": stage}}, source)
        except ConfigError as error:
            refusals.append(error)
    if not found:
        raise refusals[0]
    return found


def as_yaml(config: Config, open_stage: bool = False) -> str:
    """Return the resolved configuration as YAML that `load_config` reads back to an equal object.

    Args:
        config: the configuration to write.
        open_stage: write `auto` for its ZeRO stage, which is then chosen again on reading.
    """
    values = config.model_dump()
    if open_stage:
        values["deepspeed"]["zero_stage"] = AUTO
    return OmegaConf.to_yaml(OmegaConf.create(escape(values)))


def save_config(config: Config, path: Path, open_stage: bool = False) -> None:
    """Write the result of `as_yaml`, whole or not at all."""
    write_whole(path, as_yaml(config, open_stage))
