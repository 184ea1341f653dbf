"""Apply a user's own factors, by role or name, to what the table decides for a tensor (`*_multipliers`)."""

import math
import re
from collections.abc import Callable, Mapping, Sequence

from plumbline.model.parameterization.rows import ParameterRow


class OwnFactors:
    """Hold one key of the parameterization section, and track which of its entries matched a tensor.

    Args:
        key: key of the section, for messages.
        factors: role or regular expression over whole names -> factor.
    """

    def __init__(self, key: str, factors: Mapping[str, float]) -> None:
        self.key, self.factors, self.unmatched = key, factors, set(factors)

    def matches(self, name: str, role: str) -> list[str]:
        """Return the entries that match a tensor."""
        return [key for key in self.factors if key == role or re.fullmatch(key, name)]

    def of(self, name: str, role: str) -> float:
        """Return the product of all factors that match a tensor, or 1 if none does."""
        matches = self.matches(name, role)
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

    def check_first_values(self, rows: Sequence[ParameterRow], scaled: Callable[[str], bool]) -> None:
        """Refuse an entry that changes no first value, for factors on their standard deviation.

        An entry may match others besides one that it changes: one for a layer's weight and bias is for the weight.

        Args:
            rows: the table.
            scaled: whether the first values of a tensor of this name depend on the table's factor.

        Raises:
            ValueError: names an entry and a tensor that it matches.
        """
        for key in self.factors:
            matched = [row for row in rows if key in self.matches(row.name, row.role)]
            if not any(scaled(row.name) for row in matched):
                raise ValueError(
                    f"parameterization.{self.key}: {key} = {self.factors[key]:g} changes nothing: the first values of "
                    f"{matched[0].name} do not depend on a standard deviation that the table sets; leave {key} out"
                )
