"""Questions about public texts: LongEval's lines and topics (LongChat, Li et al. 2023), and QMSum's meetings.

LongEval: https://github.com/DachengLi1/LongChat; QMSum: https://github.com/Yale-LILY/QMSum (Zhong et al., 2021).
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.evict.everyday_facts import Question, Scene
from benchmarks.recall.scenes import encode, frame

EACH = 8  # lines that are asked for, of each record
ORDINALS = ("first", "second", "third", "fourth", "fifth")


def read_lines(tokenizer: Any, folder: Path, tokens: int) -> Iterator[Scene]:
    """Yield records of lines, cut after about `tokens` tokens, and ask for the numbers of some lines."""
    for seed, record in enumerate(_records(folder / "200_lines.jsonl")):
        opening, _, rest = record["prompt"].partition("\n\nline ")
        text, kept = opening + "\n\n", []
        for line in ("line " + rest).splitlines(keepends=True):
            if not line.startswith("line ") or len(encode(tokenizer, text + line)) > tokens:
                break
            text += line
            kept.append(line)
        asked = []
        for line in random.Random(seed).sample(kept, EACH):
            name, _, number = line.removeprefix("line ").rstrip(">\n").partition(": REGISTER_CONTENT is <")
            question = f"Now the record is over. Tell me what is the <REGISTER_CONTENT> in line {name}?"
            asked.append((question, f"The <REGISTER_CONTENT> in line {name} is <", number))
        yield _scene(tokenizer, "lines", text, asked)


def read_topics(tokenizer: Any, folder: Path, tokens: int) -> Iterator[Scene]:
    """Yield conversations, cut after about `tokens` tokens, and ask for each topic that they begin with."""
    for record in _records(folder / "5_topics.jsonl"):
        text = tokenizer.decode(encode(tokenizer, record["prompt"].partition("Now the record ends.")[0])[:tokens])
        asked = []
        for ordinal, topic in zip(ORDINALS, record["topics"], strict=True):
            name = topic[0].lower() + topic[1:]
            if f"discuss the topic of {name}" in text:
                question = f"Now the record ends. What is the {ordinal} topic we discussed?"
                asked.append((question, f"The {ordinal} topic we discussed is", f" {name}"))
        yield _scene(tokenizer, "topics", text, asked)


def read_meetings(tokenizer: Any, folder: Path, tokens: int) -> Iterator[Scene]:
    """Yield parts of meetings of at most `tokens` tokens that hold all that is relevant for a question."""
    for meeting in _records(folder / "ALL_val.jsonl"):
        turns = [f"{turn['speaker']}: {turn['content']}\n" for turn in meeting["meeting_transcripts"]]
        sizes = [len(encode(tokenizer, turn)) for turn in turns]
        for asked in meeting["specific_query_list"]:
            spans = [tuple(map(int, span)) for span in asked["relevant_text_span"]]
            first, last = min(start for start, _ in spans), max(stop for _, stop in spans)
            if sum(sizes[first : last + 1]) > 0.8 * tokens:
                continue
            while first > 0 and sum(sizes[first - 1 : last + 1]) < tokens:
                first -= 1
            yield _scene(
                tokenizer, "meetings", "".join(turns[first : last + 1]), [(asked["query"], "", asked["answer"])]
            )
            break  # one question of each meeting


TASKS: dict[str, Callable[[Any, Path, int], Iterator[Scene]]] = {
    "lines": read_lines,
    "topics": read_topics,
    "meetings": read_meetings,
}


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _scene(tokenizer: Any, kind: str, text: str, asked: list[tuple[str, str, str]]) -> Scene:
    """Return a scene of questions, beginnings of answers, and their rests."""
    chat = frame(tokenizer, "")
    after = chat.after or "\n"
    questions = [
        Question(kind, encode(tokenizer, f"\n\n{question}{after}{opening}"), encode(tokenizer, answer))
        for question, opening, answer in asked
    ]
    return Scene([*chat.head, *encode(tokenizer, text)], questions)
