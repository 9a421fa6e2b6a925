"""Two public collections, Cranfield (abstracts) and QMSum (meetings), plain BM25, and measures of a ranking."""

import json
import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean


def measure(rankings: list[list[int]], relevant: list[dict[int, int]]) -> dict[str, float]:
    """Return R@5, R@10, R@20, MRR and nDCG@10, each the mean over the queries."""
    pairs = list(zip(rankings, relevant, strict=True))
    recalls = {f"R@{k}": mean(len(set(r[:k]) & gains.keys()) / len(gains) for r, gains in pairs) for k in (5, 10, 20)}
    mrr = mean(next((1 / place for place, d in enumerate(r, 1) if d in gains), 0.0) for r, gains in pairs)
    return recalls | {"MRR": mrr, "nDCG@10": mean(_ndcg(r[:10], gains) for r, gains in pairs)}


def _ndcg(ranking: list[int], gains: dict[int, int]) -> float:
    ideal = sorted(gains.values(), reverse=True)[:10]
    return _dcg([gains.get(d, 0) for d in ranking]) / _dcg(ideal)


def _dcg(gains: list[int]) -> float:
    return sum(gain / math.log2(place + 1) for place, gain in enumerate(gains, 1))


K1, B = 1.2, 0.75


class PlainBM25:
    """Robertson's BM25 with the idf that is never negative; each word of the query counts once."""

    def __init__(self, documents: dict[int, str]) -> None:
        self._lengths = {}
        self._postings: dict[str, dict[int, int]] = defaultdict(dict)
        for document, text in documents.items():
            words = re.findall(r"\w+", text.lower())
            self._lengths[document] = len(words)
            for word, count in Counter(words).items():
                self._postings[word][document] = count
        self._mean = sum(self._lengths.values()) / len(self._lengths)

    def rank(self, query: str, limit: int) -> list[int]:
        scores: Counter[int] = Counter()
        for word in dict.fromkeys(re.findall(r"\w+", query.lower())):
            postings = self._postings.get(word, {})
            idf = math.log(1 + (len(self._lengths) - len(postings) + 0.5) / (len(postings) + 0.5))
            for document, count in postings.items():
                norm = 1 - B + B * self._lengths[document] / self._mean
                scores[document] += idf * count * (K1 + 1) / (count + K1 * norm)
        return [d for d, _ in sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))[:limit]]


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
