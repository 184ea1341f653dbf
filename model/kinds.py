"""Find a kind (of block, attention, ...) by name, and check its requirements on other switches."""

import difflib
import inspect
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
    raise ValueError(f"{key} = {name}: there is none of that name; {nearest(name, kinds, 0.7)}")


def nearest(name: str, known: Iterable[str], cutoff: float) -> str:
    """Return the question whether a known name, at least so similar, is meant, or a list of all."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"did you mean {close[0]}?" if close else f"it is one of {', '.join(known)}"


def check_written(part: object, base: type, members: Iterable[str]) -> None:
    """Refuse a kind that does not have what its base leaves to it.

    Args:
        part: an object of the kind.
        base: the common base of all kinds.
        members: names of methods and attributes, whether declared in the base or not.

    Raises:
        ValueError: names the kind and what it lacks.
    """
    kind = type(part)
    for member in members:
        inherited = inspect.getattr_static(base, member, None)
        if member not in vars(part) and inspect.getattr_static(kind, member, None) is inherited:
            raise ValueError(
                f"{kind.__module__}.{kind.__name__} has no {member}: a kind states its own, "
                f"see {base.__name__} in {base.__module__}"
            )


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
