"""Find a kind (of block, attention, ...) by name, and check its requirements on other switches."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Need:
    """State with which values of other switches a kind can be combined."""

    fitting: Mapping[str, tuple[Any, ...]]
    """Switch of the ModelConfig -> the values that fit."""
    why: str
    """The reason, as a sentence about the kind: "mixes the whole prefix"."""

    def check(self, what: str, config: object) -> None:
        """Refuse a configuration that has a value that does not fit.

        Args:
            what: the key and value with this requirement: "attention = mixing".
            config: the configuration with the switches.

        Raises:
            ValueError: names both keys, their values and what would fit.
        """
        for key, fitting in self.fitting.items():
            value = getattr(config, key)
            if value not in fitting:
                known = " or ".join(str(each) for each in fitting)
                raise ValueError(f"{what} {self.why}: {key} = {value} does not fit, set it to {known}")


def kind_named(kinds: Mapping[str, Kind], key: str, name: str) -> Kind:
    """Return the kind of this name.

    Args:
        kinds: the known kinds by name.
        key: the configuration key that names it.
        name: the configured name.

    Raises:
        ValueError: there is no such kind; the message suggests the nearest name, or lists all.
    """
    if name in kinds:
        return kinds[name]
    close = difflib.get_close_matches(name, kinds, n=1, cutoff=0.7)
    hint = f"did you mean {close[0]}?" if close else f"it is one of {', '.join(kinds)}"
    raise ValueError(f"{key} = {name}: there is none of that name; {hint}")


def state_anew(kind: type, base: type, flags: Iterable[str]) -> None:
    """Reset the flags that a kind does not set itself to the base's, so that none is inherited from another kind.

    Args:
        kind: a class below `base`.
        base: the common base of all kinds.
        flags: names of class attributes.
    """
    for flag in flags:
        if flag not in kind.__dict__:
            setattr(kind, flag, getattr(base, flag))
