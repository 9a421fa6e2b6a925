"""Print word problems of one and two steps in GSM8K's format, for models that cannot solve GSM8K.

python -m benchmarks.quality.problems > problems.jsonl
"""

import json
import random
from collections.abc import Iterator

COUNT = 85
_NAMES = ("Anna", "Ben", "Clara", "David", "Ella", "Finn", "Greta", "Hugo")
_THINGS = ("apples", "books", "coins", "stamps", "shells", "marbles", "cards", "pencils")


def problems(count: int = COUNT) -> Iterator[dict[str, str]]:
    rng = random.Random(20)
    for number in range(count):
        name, other = rng.sample(_NAMES, 2)
        what, a, b, c = rng.choice(_THINGS), rng.randint(12, 40), rng.randint(2, 11), rng.randint(2, 9)
        question, steps, answer = (
            (f"{name} has {a} {what} and gets {b} more. How many {what} does {name} have now?",
             f"{a} + {b} = {a + b}.", a + b),
            (f"{name} has {a} {what} and gives {b} of them to {other}. How many {what} does {name} have left?",
             f"{a} - {b} = {a - b}.", a - b),
            (f"{name} has {c} boxes with {b} {what} in each. How many {what} are there in all?",
             f"{c} * {b} = {c * b}.", c * b),
            (f"{name} has {a} {what}, gets {b} more, and then gives {c} to {other}. How many {what} are left?",
             f"{a} + {b} = {a + b}. {a + b} - {c} = {a + b - c}.", a + b - c),
            (f"{name} has {a} {what}. {other} has {b} more than {name}. How many {what} do they have together?",
             f"{a} + {b} = {a + b}. {a} + {a + b} = {2 * a + b}.", 2 * a + b),
        )[number % 5]  # fmt: skip
        yield {"question": question, "answer": f"{steps}\n#### {answer}"}


if __name__ == "__main__":
    for problem in problems():
        print(json.dumps(problem))
