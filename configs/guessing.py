"""The environment of configs/guessing.yaml: a game of several turns."""

import re
from collections.abc import Mapping
from typing import Any


class GuessNumber:
    """A number is guessed; after every guess the model hears whether the number is higher or lower.

    The number is the column `answer`. Reward: 1 for a guess that is right, and less the later it comes. A reply without
    a number costs `wrong`.
    """

    def __init__(self, low: int = 1, high: int = 20, guesses: int = 5, wrong: float = -0.1):
        self.low, self.high, self.guesses, self.wrong = low, high, guesses, wrong
        self.notes = {"guesses": 0}

    def start(self, row: Mapping[str, Any]):
        self.secret = int(row["answer"])
        return [
            {
                "role": "user",
                "content": f"I think of a whole number from {self.low} to {self.high}. You have {self.guesses} "
                "guesses. Reply with one number at a time, and I say whether mine is higher or lower.",
            }
        ]

    def step(self, reply: str):
        self.notes["guesses"] += 1
        over = self.notes["guesses"] == self.guesses
        found = re.findall(r"\d+", reply)
        if len(found) != 1 or len(found[0]) > 9:
            return [self._say("Reply with one number.")], over, self.wrong
        guess = int(found[0])
        if guess == self.secret:
            return [], True, 1.0 - 0.5 * (self.notes["guesses"] - 1) / self.guesses
        return [self._say("Higher." if guess < self.secret else "Lower.")], over, 0.0

    def _say(self, text: str) -> dict[str, str]:
        return {"role": "user", "content": text}
