"""Generate addition problems: the sum of two numbers of some decimal digits.

least_first   5 2 1 + 7 9 0 = [2 2 2 0]      125 + 97 = 222, ones first: a carry is known in time
most_first    1 2 5 + 0 9 7 = [0 2 2 2]
"""

from typing import Literal

import numpy as np
from pydantic import PositiveInt

from plumbline.data.indexed import Int64s
from plumbline.data.tasks.draws import Draws
from plumbline.data.tasks.task import DrawnTaskConfig, Example, answering

PLUS = 1
EQUALS = 2
FIRST_DIGIT = 3


class AdditionConfig(DrawnTaskConfig):
    """Configure decimal addition.

    Token 1 is plus, 2 is equals, 3 to 12 are the digits. a + b and b + a are two examples.
    """

    name: Literal["addition"] = "addition"
    """Which task."""
    digits: PositiveInt = 3
    """Digits of each summand, leading zeros included; the sum has one more. Digits are drawn uniformly."""
    order: Literal["least_first", "most_first"] = "least_first"
    """How all three numbers are written: starting from the ones, or as usual."""

    @property
    def vocab_size(self) -> int:
        """Return the number of ids: padding, plus, equals and ten digits."""
        return FIRST_DIGIT + 10

    @property
    def longest(self) -> int:
        """Return the number of input tokens of every example; the last answer is not an input."""
        return 2 * (self.digits + 1) + self.digits

    def draw(self, draws: Draws) -> Example:
        """Draw one random example."""
        first, second = draws.integers(2 * self.digits, 10).reshape(2, self.digits).tolist()
        total, carry = [], 0
        for one, other in zip(first, second, strict=True):
            carry, digit = divmod(one + other + carry, 10)
            total.append(digit)
        numbers = [first, second, [*total, carry]]
        if self.order == "most_first":
            numbers = [number[::-1] for number in numbers]
        left, right, answer = (FIRST_DIGIT + np.array(number, np.int64) for number in numbers)
        sequence = np.concatenate((left, [PLUS], right, [EQUALS], answer))
        return answering(sequence, np.arange(len(sequence)) >= len(sequence) - len(answer))

    def ask_otherwise(self, tokens: Int64s, draws: Draws) -> Int64s:
        """Ask for the sum of two other summands."""
        asked: Int64s = tokens.copy()
        places = np.delete(np.arange(2 * self.digits + 1), self.digits)
        asked[places] = FIRST_DIGIT + draws.integers(2 * self.digits, 10)
        return asked
