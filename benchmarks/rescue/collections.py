"""Two public collections, Cranfield (abstracts) and QMSum (meetings), as documents, queries and judgments."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

WORDS_A_SPAN = 180  # about the 256 tokens that an embedder of sentences takes in


@dataclass
class Collection:
    name: str
    documents: dict[int, str]
    queries: list[str] = field(default_factory=list)
    relevant: list[dict[int, int]] = field(default_factory=list)  # for each query: document -> gain


def cranfield(folder: Path) -> list[Collection]:
    """Return 1,400 abstracts and 225 queries; gains are 4 for grade 1, a complete answer, to 1 for grade 4."""
    documents = {int(number): body for number, body in _records(folder / "cran.all.1400")}
    queries = [body for _, body in _records(folder / "cran.qry")]
    relevant: list[dict[int, int]] = [{} for _ in queries]
    for line in (folder / "cranqrel").read_text().splitlines():
        query, document, grade = map(int, line.split()[:3])
        if grade > 0:
            relevant[query - 1][document] = 5 - grade
    return [Collection("cranfield", documents, queries, relevant)]


def _records(path: Path) -> list[tuple[str, str]]:
    """Return (number, text of field .W) of each record that starts with .I."""
    records = re.split(r"^\.I ", path.read_text(), flags=re.MULTILINE)[1:]
    return [(record.split("\n", 1)[0], re.split(r"^\.W\n", record, flags=re.MULTILINE)[1]) for record in records]


def qmsum(folder: Path) -> list[Collection]:
    """Return 35 meetings, each a session of spans of whole turns; those that hold evidence are relevant."""
    return [_meeting(json.loads(line)) for line in (folder / "ALL_val.jsonl").read_text().splitlines()]


def _meeting(record: dict) -> Collection:
    turns = [f"{turn['speaker']}: {turn['content']}\n" for turn in record["meeting_transcripts"]]
    span_of_turn: list[int] = []
    meeting = Collection("qmsum", {0: ""})
    for turn in turns:
        last = len(meeting.documents) - 1
        if len(meeting.documents[last].split()) >= WORDS_A_SPAN:
            last += 1
            meeting.documents[last] = ""
        meeting.documents[last] += turn
        span_of_turn.append(last)
    for question in record["specific_query_list"]:
        evidence = {
            span_of_turn[turn]
            for first, last in question["relevant_text_span"]
            for turn in range(int(first), min(int(last) + 1, len(turns)))
        }
        if evidence:
            meeting.queries.append(question["query"])
            meeting.relevant.append(dict.fromkeys(evidence, 1))
    return meeting
