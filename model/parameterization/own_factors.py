"""Apply a user's own factors on what the table decides for a tensor, by role or by name (`*_multipliers`)."""

import math
import re
from collections.abc import Mapping, Sequence

from plumbline.model.parameterization.rows import ParameterRow

INERT = {
    "lr_multipliers": "does not train",
    "weight_decay_multipliers": "has no weight decay, or does not train",
    "init_multipliers": "starts from one value, or is drawn by a rule of its own",
    "eps_multipliers": "does not train, or its optimizer reads no eps",
}
"""Key of the section -> why a factor cannot act on a tensor."""


class OwnFactors:
    """Hold one key of the parameterization section, and remember which of its entries met a tensor and can act on it.

    Args:
        key: of the section, for messages.
        factors: role or regular expression over whole names -> factor.
    """

    def __init__(self, key: str, factors: Mapping[str, float]) -> None:
        self.key, self.factors, self.unmatched, self.inert = key, factors, set(factors), set(factors)

    def of(self, name: str, role: str, acts: bool) -> float:
        """Return the product of all factors that match a tensor, 1 where none does; `acts`: they change something."""
        matches = [key for key in self.factors if key == role or re.fullmatch(key, name)]
        self.unmatched -= set(matches)
        self.inert -= set(matches if acts else [])
        return math.prod(self.factors[key] for key in matches)

    def check_all_met(self, rows: Sequence[ParameterRow]) -> None:
        """Refuse an entry that matched no tensor of the table, or only such as it cannot change.

        Raises:
            ValueError: names the entry, and the roles and the form of names, or why it changes nothing.
        """
        if self.unmatched:
            raise ValueError(
                f"parameterization.{self.key}: {', '.join(sorted(self.unmatched))} matches no parameter; roles are "
                f"{', '.join(dict.fromkeys(row.role for row in rows))}, names are like {rows[1].name}"
            )
        if self.inert:
            raise ValueError(
                f"parameterization.{self.key}: {', '.join(sorted(self.inert))} changes nothing, for what it matches "
                f"{INERT[self.key]}; leave it out"
            )
