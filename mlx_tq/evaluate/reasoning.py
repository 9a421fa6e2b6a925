"""Ask word problems with a number for an answer, in the format of GSM8K (Cobbe et al. 2021).

The format is JSON lines with `question` and `answer`, which ends in `#### 42`. A few worked problems precede each
question, as turns of a chat if the model has a template.
"""

import json
import random
import re
from collections.abc import Sequence
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple

from mlx_tq.cli.inputs import read_file
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.asking import Sample, share_prefixes
from mlx_tq.session.text import render_messages

_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_BOXED = re.compile(rf"\\boxed\{{\s*({_NUMBER})")
_ANY = re.compile(_NUMBER)


class Problem(NamedTuple):
    question: str
    worked_answer: str
    number: Decimal


def read_problems(path: str) -> list[Problem]:
    problems = []
    for number, line in enumerate(read_file("problems", path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            question, worked_answer = str(record["question"]), str(record["answer"])
            problems.append(Problem(question, worked_answer, _to_decimal(_MARKED.findall(worked_answer)[-1])))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigError(
                f"line {number} of {path} is not a problem in GSM8K's format ({error!r}); a line is "
                '{"question": "...", "answer": "... #### 42"}.'
            ) from error
    return problems


def final_number(answer: str) -> Decimal | None:
    """Return the number after `####`, else the boxed one, else the last number of an answer."""
    for pattern in (_MARKED, _BOXED, _ANY):
        if numbers := pattern.findall(answer):
            return _to_decimal(numbers[-1])
    return None


def _to_decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("$", ""))


def without_thoughts(tokenizer: Any, prompt: str, text: str) -> str | None:
    """Return a generated text without the model's thinking, or None if the thinking did not end."""
    if not tokenizer.has_thinking:
        return text
    if tokenizer.think_end in text:
        return text.rpartition(tokenizer.think_end)[2]
    has_begun = prompt.rstrip().endswith(tokenizer.think_start) or tokenizer.think_start in text
    return None if has_begun else text


def problem_samples(
    tokenizer: Any, problems: Sequence[Problem], *, shots: int, count: int, seeds: int, chat: bool
) -> list[Sample]:
    """Return the `count` problems after the first `shots`, as one group for each seed, which shuffles the shots."""
    worked, questions = problems[:shots], problems[shots : shots + count]
    if not questions:
        raise ConfigError(
            f"the file has {len(problems)} problems; {shots} are shown worked, and none is left. Use fewer --shots."
        )
    samples = []
    for seed in range(seeds):
        shuffled = random.Random(seed).sample(worked, len(worked))
        of_seed = []
        for number, problem in enumerate(questions):
            key, text = f"{seed} {number}", _prompt(tokenizer, shuffled, problem.question, chat)
            ids = list(tokenizer.encode(text, add_special_tokens=not chat))
            judge = partial(_judge, tokenizer, text, problem.number)
            fields = {"group": f"{shots}-shot" if seeds == 1 else f"{shots}-shot, order {seed + 1}"}
            of_seed.append(Sample(key, ids, str(problem.number), judge, fields, stop="" if chat else "\nQuestion:"))
        samples += share_prefixes(of_seed)
    return samples


def _prompt(tokenizer: Any, worked: Sequence[Problem], question: str, chat: bool) -> str:
    if not chat:
        examples = "".join(f"Question: {example.question}\nAnswer: {example.worked_answer}\n\n" for example in worked)
        return f"{examples}Question: {question}\nAnswer:"
    turns = [
        {"role": role, "content": content}
        for example in worked
        for role, content in (("user", example.question), ("assistant", example.worked_answer))
    ]
    turns.append({"role": "user", "content": question})
    return render_messages(tokenizer, turns, add_generation_prompt=True)


def _judge(tokenizer: Any, prompt: str, expected: Decimal, text: str) -> tuple[str, float]:
    answer = without_thoughts(tokenizer, prompt, text)
    number = None if answer is None else final_number(answer)
    return "" if number is None else str(number), float(number == expected)
