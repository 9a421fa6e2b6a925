"""Documents of two public collections, cut to fit, with a question behind them: LongEval lines, QMSum meetings."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Of a document's tokens, the evidence's at most.
_MOST_EVIDENCE = 0.25
# Where evidence begins and ends, as a share of the document: what stands at an edge may stay in the cache.
_FIRST, _LAST = 0.1, 0.85


@dataclass(frozen=True)
class Document:
    """A text in pieces, the numbers of those that are evidence, and the question behind the text."""

    pieces: list[str]
    evidence: list[int]
    question: str


Count = Callable[[str], int]


def lines(path: Path, tokens: int, count: Count) -> Iterator[Document]:
    """Yield LongEval's records of lines, one of which is asked for; of each record as many lines as fit."""
    for number, text in enumerate((path / "longeval" / "200_lines.jsonl").read_text(encoding="utf-8").splitlines()):
        case = json.loads(text)
        head, _, rest = case["prompt"].partition("\n\n")
        record, _, question = rest.rpartition("\n\n")
        pieces = [f"{line}\n" for line in record.splitlines()]
        asked = pieces.index(case["correct_line"].strip() + "\n")
        space = tokens - count(head) - count(question)
        found = _cut(pieces, [asked], space, count, random.Random(number))
        if found is not None:
            kept, evidence = found
            yield Document([head + "\n\n", *kept], [place + 1 for place in evidence], question.strip())


def meetings(path: Path, tokens: int, count: Count) -> Iterator[Document]:
    """Yield QMSum's questions, each with the part of the meeting around the turns that answer it."""
    for number, text in enumerate((path / "qmsum" / "ALL_val.jsonl").read_text(encoding="utf-8").splitlines()):
        meeting = json.loads(text)
        turns = [f"{turn['speaker']}: {turn['content']}\n" for turn in meeting["meeting_transcripts"]]
        for place, query in enumerate(meeting["specific_query_list"]):
            evidence = sorted({t for a, b in query["relevant_text_span"] for t in range(int(a), int(b) + 1)})
            evidence = [turn for turn in evidence if turn < len(turns)]
            space = tokens - count(query["query"])
            rng = random.Random(1000 * number + place)
            found = _cut(turns, evidence, space, count, rng) if evidence else None
            if found is not None and sum(count(found[0][i]) for i in found[1]) <= _MOST_EVIDENCE * tokens:
                yield Document(found[0], found[1], query["query"])


def _cut(
    pieces: list[str], evidence: list[int], space: int, count: Count, rng: random.Random
) -> tuple[list[str], list[int]] | None:
    """Return neighboring pieces of up to `space` tokens with all evidence well inside, or None."""
    first, last = evidence[0], evidence[-1]
    inside = sum(count(piece) for piece in pieces[first : last + 1])
    low, high = _FIRST * space, _LAST * space - inside
    if high < low:
        return None
    wanted, before, start = rng.uniform(low, high), 0, first
    while start and before + (size := count(pieces[start - 1])) <= wanted:
        start, before = start - 1, before + size
    used, stop = before + inside, last + 1
    while stop < len(pieces) and used + (size := count(pieces[stop])) <= space:
        stop, used = stop + 1, used + size
    if before < low or before + inside > _LAST * used:
        return None
    return pieces[start:stop], [place - start for place in evidence]


COLLECTIONS: dict[str, Callable[[Path, int, Count], Iterator[Document]]] = {"longeval": lines, "qmsum": meetings}


def chosen(name: str, path: Path, tokens: int, tokenizer: Any) -> list[Document]:
    return list(COLLECTIONS[name](path, tokens, lambda text: len(tokenizer.encode(text, add_special_tokens=False))))
