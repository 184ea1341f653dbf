"""Apply a user's own factors, by role or name, to what the table decides for a tensor (`*_multipliers`)."""

import math
import re
from collections.abc import Mapping, Sequence

from plumbline.model.parameterization.rows import ParameterRow


class OwnFactors:
    """Hold one key of the parameterization section, and track which of its entries matched a tensor.

    Args:
        key: key of the section, for messages.
        factors: role or regular expression over whole names -> factor.
    """

    def __init__(self, key: str, factors: Mapping[str, float]) -> None:
        self.key, self.factors, self.unmatched = key, factors, set(factors)

    def of(self, name: str, role: str) -> float:
        """Return the product of all factors that match a tensor, or 1 if none does."""
        matches = [key for key in self.factors if key == role or re.fullmatch(key, name)]
        self.unmatched -= set(matches)
        return math.prod(self.factors[key] for key in matches)

    def check_all_met(self, rows: Sequence[ParameterRow]) -> None:
        """Refuse an entry that matched no tensor of the table.

        Raises:
            ValueError: an entry matched nothing; names it, the roles and the form of names.
        """
        if self.unmatched:
            raise ValueError(
                f"parameterization.{self.key}: {', '.join(sorted(self.unmatched))} matches no parameter; roles are "
                f"{', '.join(dict.fromkeys(row.role for row in rows))}, names are like {rows[1].name}"
            )
