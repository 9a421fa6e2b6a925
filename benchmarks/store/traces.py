"""Requests as a store of prefixes sees them: blocks of 256 tokens, named by all that comes before them.

Conversations about the meetings of QMSum and about the records of LongEval, and scripted agents whose tasks share the
texts and tools of three roles. Several go on at once, so that their requests take turns. A token is four characters.
"""

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path

from mlx_tq.cli.haystack import load_text

TOKENS, CHARACTERS = 256, 1024  # of a block
GAP = 5.0  # seconds between two requests of a conversation, on average
SYSTEM = "You are a careful assistant. Answer from the record alone, and say so where it does not tell.\n" * 16


@dataclass(frozen=True)
class Block:
    """A block of a prompt."""

    key: bytes  # of it and all before it
    source: str  # whose text it ends with: system, user, assistant, tool or generation
    text: str


@dataclass(frozen=True)
class Request:
    at: float
    blocks: list[Block]


def blocks_of(messages):
    text = "".join(part for _, part in messages)
    edges, found, digest, at = [], [], b"", 0
    for source, part in messages:
        edges.append((at, source))
        at += len(part)
    for start in range(0, len(text) - CHARACTERS + 1, CHARACTERS):
        part = text[start : start + CHARACTERS]
        digest = hashlib.sha256(digest + part.encode()).digest()
        end = start + CHARACTERS - 1
        found.append(Block(digest, next(source for first, source in reversed(edges) if first <= end), part))
    return found


def merged(conversations, at_once, chance):
    free, requests = [0.0] * at_once, []
    for prompts in conversations:
        lane = free.index(min(free))
        for messages in prompts:
            free[lane] += chance.expovariate(1 / GAP)
            requests.append(Request(free[lane], blocks_of(messages)))
    return sorted(requests, key=lambda request: request.at)


def chat(document, questions):
    messages = [("system", SYSTEM), ("user", document)]
    for question, answer in questions:
        messages.append(("user", question))
        yield [*messages, ("generation", answer)]
        messages.append(("assistant", answer))


def meetings(data, chance):
    """Return QMSum's meetings, each in two conversations of up to four questions."""
    found = []
    for line in (data / "qmsum" / "ALL_val.jsonl").read_text(encoding="utf-8").splitlines():
        meeting = json.loads(line)
        text = "\n".join(f"{turn['speaker']}: {turn['content']}" for turn in meeting["meeting_transcripts"])
        asked = [(q["query"], q["answer"]) for q in (*meeting["general_query_list"], *meeting["specific_query_list"])]
        for _ in range(2):
            chance.shuffle(asked)
            found.append(list(chat(text, asked[:4])))
    chance.shuffle(found)
    return merged(found, 6, chance)


def records(data, chance):
    """Return LongEval's 100 records in 200 conversations, most of them about few of the records."""
    documents = []
    for name in ("200_lines", "5_topics"):
        for line in (data / "longeval" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            documents.append(json.loads(line)["prompt"])
    chance.shuffle(documents)
    asked = [(f"What does line {n} say?", "It says so.") for n in range(3)]
    weights = [1 / (1 + rank) for rank in range(len(documents))]
    return merged([list(chat(text, asked)) for text in chance.choices(documents, weights, k=200)], 6, chance)


def agents(_data, chance):
    """Return 60 tasks of 6 to 12 steps by three roles with texts and tools of 3,000 to 6,000 tokens."""
    words = load_text() * 4
    roles = [words[n * 30_000 : n * 30_000 + size] for n, size in enumerate((12_000, 18_000, 24_000))]

    def text(least, most):
        size, start = chance.randint(least, most), chance.randrange(len(words) - most)
        return f"{chance.random()} {words[start : start + size]}"

    def task(role):
        messages = [("system", roles[role]), ("user", text(400, 4000))]
        for _ in range(chance.randint(6, 12)):
            call = text(100, 1200)
            yield [*messages, ("generation", call)]
            messages += [("assistant", call), ("tool", text(500, 9000))]
            if chance.random() < 0.05:
                yield from task((role + 1) % len(roles))

    return merged([list(task(chance.choices((0, 1, 2), (6, 3, 1))[0])) for _ in range(60)], 4, chance)


def traces(data: Path | None, seed: int = 0):
    found = {"agents": agents} if data is None else {"QMSum": meetings, "LongEval": records, "agents": agents}
    return {name: make(data, random.Random(seed)) for name, make in found.items()}
