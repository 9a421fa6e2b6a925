"""Problems with a number for an answer, in the format of GSM8K (Cobbe et al. 2021).

That is JSON lines with `question` and `answer`, which ends in `#### 42`. A few worked ones stand before each, as turns
of a chat where the model has a template. Of a model that thinks, what it thought is no answer.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.paired import Judged, Sample, with_shared
from mlx_tq.evaluate.thoughts import without_thoughts

MARK = "####"
_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"
_MARKED = re.compile(rf"{MARK}\s*({_NUMBER})")
_BOXED = re.compile(rf"\\boxed\{{\s*({_NUMBER})")
_ANY = re.compile(_NUMBER)
_NEXT = "\nQuestion:"


@dataclass(frozen=True)
class Problem:
    """A question, its worked answer, and the number in it."""

    question: str
    worked: str
    number: Decimal


def read_problems(path: str) -> list[Problem]:
    """The problems of a file.

    Raises:
        ConfigError: it cannot be read, or a line is not of this format.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the problems {path} cannot be read: {error}. Give a file in GSM8K's format.") from error
    problems = []
    for place, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            question, worked = str(record["question"]), str(record["answer"])
            marked = _MARKED.findall(worked)
            problems.append(Problem(question, worked, _value(marked[-1])))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigError(
                f"line {place} of {path} is no problem in GSM8K's format ({error!r}); a line is "
                '{"question": "...", "answer": "... #### 42"}.'
            ) from error
    return problems


def final_number(answer: str) -> Decimal | None:
    """The number that an answer ends with: behind `####`, else boxed, else the last; None where there is none."""
    for pattern in (_MARKED, _BOXED, _ANY):
        if found := pattern.findall(answer):
            return _value(found[-1])
    return None


def _value(written: str) -> Decimal:
    return Decimal(written.replace(",", "").replace("$", ""))


def problem_samples(
    tokenizer: Any, problems: Sequence[Problem], *, shots: int, count: int, seeds: int, chat: bool
) -> list[Sample]:
    """The first `count` problems behind the first `shots`, once a seed, which shuffles the shots.

    Raises:
        ConfigError: too few problems.
    """
    shown, asked = problems[:shots], problems[shots : shots + count]
    if not asked:
        raise ConfigError(
            f"the file has {len(problems)} problems; {shots} are shown worked, and none is left. Take fewer --shots."
        )
    samples = []
    for seed in range(seeds):
        order = random.Random(seed).sample(range(len(shown)), len(shown))
        for place, problem in enumerate(asked):
            text = _prompt(tokenizer, [shown[number] for number in order], problem, chat)
            samples.append(
                Sample(
                    key=f"{seed} {place}",
                    group=f"{shots}-shot, seed {seed}",
                    ids=list(tokenizer.encode(text, add_special_tokens=not chat)),
                    shared=0,
                    expected=str(problem.number),
                    judge=_judge(tokenizer, problem, text),
                    stop="" if chat else _NEXT,
                )
            )
    return [Sample(**{**vars(sample), "group": f"{shots}-shot"}) for sample in with_shared(samples)]


def _prompt(tokenizer: Any, shown: Sequence[Problem], problem: Problem, chat: bool) -> str:
    if chat:
        turns = [
            {"role": role, "content": words}
            for each in shown
            for role, words in (("user", each.question), ("assistant", each.worked))
        ]
        turns.append({"role": "user", "content": problem.question})
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    worked = "".join(f"Question: {each.question}\nAnswer: {each.worked}\n\n" for each in shown)
    return f"{worked}Question: {problem.question}\nAnswer:"


def _judge(tokenizer: Any, problem: Problem, prompt: str) -> Callable[[str], Judged]:
    def judge(text: str) -> Judged:
        answer = without_thoughts(tokenizer, prompt, text)
        number = None if answer is None else final_number(answer)
        return Judged("" if number is None else str(number), float(number == problem.number))

    return judge
