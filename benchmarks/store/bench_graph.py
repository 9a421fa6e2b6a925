"""Compare eviction from a prefix cache by KVCacheGraph, as published (aither-kvcache), with LRU and FIFO.

    python -m benchmarks.store.bench_graph --data DIR     (DIR holds qmsum/ and longeval/; else the agents alone)

Each trace is replayed against caches that hold a tenth, a quarter and half of its blocks of 256 tokens (four characters
each). Traces: conversations about QMSum's meetings and LongEval's records, and scripted agents of three roles. The
graph ties blocks by shared prefixes, common use (three times or more), similar meaning (cosine .8 of hashed words) and
neighborhood, and ranks them every half second; its weights are ours, because the report does not tell them.
"""

import argparse
import hashlib
import json
import math
import os
import random
import threading
import time
import zlib
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.reports import RESULTS, save
from mlx_tq.cli.inputs import load_text

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


IMPORTANCE = {"system": 1.0, "tool": 0.6, "user": 0.6, "assistant": 0.4, "generation": 0.2}
EVERY, STALE, RANKED = 0.5, 2.0, 256  # seconds between two rankings, of the oldest that is used, and blocks of one
TOGETHER, ALIKE, DIMS = 3, 0.8, 64
SHARED = 2  # requests with other continuations from which on a prefix counts as shared
FADES = 5.0  # seconds in which having been used is worth half: of 5, 20 and 300 the best on these traces


@dataclass
class Node:
    source: str
    place: int
    used: float
    hits: int = 0
    followed: set[bytes] = field(default_factory=set)  # the blocks that came behind it
    alike: int = 0
    often: int = 0  # others that it was used together with TOGETHER times or more
    together: Counter[bytes] = field(default_factory=Counter)


class KVCacheGraph:
    """The graph of the stored blocks; with `recent`, recent use counts, too, which the report does not say."""

    def __init__(self, *, recent: bool) -> None:
        self.nodes: dict[bytes, Node] = {}
        self._recent = recent
        self._rows: dict[bytes, int] = {}
        self._free: list[int] = []
        self._meanings = np.zeros((1024, DIMS), np.float32)

    def note(self, blocks, now):
        for place, block in enumerate(blocks):
            node = self.nodes.get(block.key)
            if node is None:
                node = self.nodes[block.key] = Node(block.source, place, now)
                node.alike = self._add(block)
            else:
                node.hits += 1
            node.used = now
            if place + 1 < len(blocks):
                node.followed.add(blocks[place + 1].key)
        ends = [block.key for block in (*blocks[:2], *blocks[-2:])]
        for key in ends:
            node = self.nodes[key]
            for other in ends:
                node.together[other] += other != key
                node.often += other != key and node.together[other] == TOGETHER

    def forget(self, key):
        if self.nodes.pop(key, None) is not None:
            row = self._rows.pop(key)
            self._meanings[row] = 0
            self._free.append(row)

    def _add(self, block):
        """Add a block and return how many others are alike in meaning."""
        vector = np.zeros(DIMS, np.float32)
        for word in block.text.split():
            code = zlib.crc32(word.encode())
            vector[code % DIMS] += 1 if code & 1024 else -1
        vector /= np.linalg.norm(vector) or 1
        found = int((self._meanings @ vector >= ALIKE).sum())
        row = self._free.pop() if self._free else len(self._rows)
        if row >= len(self._meanings):
            self._meanings = np.concatenate([self._meanings, np.zeros_like(self._meanings)])
        self._meanings[row], self._rows[block.key] = vector, row
        return found

    def is_protected(self, node):
        """Return True for system text, and for what several prompts continue from."""
        return node.source == "system" or len(node.followed) >= SHARED

    def suggest_eviction(self, count, now):
        """Return the least tied and least important blocks, first those to evict first; no protected ones."""
        scored = [(self._score(node, now), -node.place, key) for key, node in list(self.nodes.items())]
        scored.sort()
        return [key for score, _, key in scored[:count] if score < float("inf")]

    def _score(self, node, now):
        if self.is_protected(node):
            return float("inf")
        ties = 0.5 * len(node.followed) + 0.1 * node.alike + 0.5 * node.often
        score = IMPORTANCE[node.source] * (1 + math.log1p(node.hits) + math.log1p(ties))
        return score * 0.5 ** ((now - node.used) / FADES) if self._recent else score

    def suggest_prefetch(self, active, held, count):
        """Return blocks that came after or together with active ones and are not stored, most frequent first."""
        found: Counter[bytes] = Counter()
        for key in active:
            node = self.nodes.get(key)
            if node is not None:
                found.update({each: 1 for each in node.followed if each not in held})
                found.update({each: n for each, n in node.together.items() if each not in held and n >= TOGETHER})
        return [key for key, _ in found.most_common(count)]


class Advisor:
    """A thread that ranks twice a second and publishes the ranking by one reference."""

    def __init__(self, graph):
        self._graph, self._ranking, self._stop = graph, (0.0, []), threading.Event()
        self.busy = self.rankings = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self):
        self._thread.start()

    def close(self):
        self._stop.set()
        self._thread.join()

    def rank(self, now):
        self._ranking = (now, self._graph.suggest_eviction(RANKED, now))

    def candidates(self, now):
        """Return the ranking, or nothing if it is stale."""
        made, ranking = self._ranking
        return ranking if now - made <= STALE else []

    def _run(self):
        while not self._stop.wait(EVERY):
            started = time.thread_time()
            self.rank(time.monotonic())
            self.busy += time.thread_time() - started
            self.rankings += 1


SHARES = (0.1, 0.25, 0.5)
PREFETCHED = 8


class Order:
    """Blocks in the order in which they leave: by use, or by when they came; of a prompt the last one first.

    Protected is system text, and what prompts go on from in so many ways; of these the ones used last, up to a half of
    what is held. None of it where `ways` is 0.
    """

    def __init__(self, *, by_use, ways=0):
        self.held: OrderedDict[bytes, None] = OrderedDict()
        self._by_use, self._ways = by_use, ways
        self._first: OrderedDict[bytes, None] = OrderedDict()
        self._followed: defaultdict[bytes, set[bytes]] = defaultdict(set)

    def note(self, blocks, _now):
        for block, after in reversed([*zip(blocks, [*blocks[1:], None], strict=True)]):
            if self._ways:
                self._protect(block, after)
            if self._by_use:
                self.held.pop(block.key, None)
            self.held.setdefault(block.key)

    def _protect(self, block, after):
        if after:
            self._followed[block.key].add(after.key)
        if block.source == "system" or len(self._followed[block.key]) >= self._ways or block.key in self._first:
            self._first[block.key] = None
            self._first.move_to_end(block.key)

    def leave(self, _now):
        while len(self._first) > len(self.held) // 2:
            self._first.popitem(last=False)
        key = next((key for key in self.held if key not in self._first), None)
        key = next(iter(self.held)) if key is None else key
        self._first.pop(key, None)
        del self.held[key]
        return key


class Advised(Order):
    """Evicts what the graph ranks last; while the graph is silent, first in, first out."""

    def __init__(self, *, recent):
        super().__init__(by_use=False)
        self.graph = KVCacheGraph(recent=recent)
        self._advisor, self._ranked, self._left = Advisor(self.graph), -EVERY, iter(())
        self.asked = self.silent = 0

    def note(self, blocks, now):
        super().note(blocks, now)
        self.graph.note(blocks, now)

    def leave(self, now):
        if now - self._ranked >= EVERY:
            self._advisor.rank(now)
            self._ranked, self._left = now, iter(self._advisor.candidates(now))
        self.asked += 1
        key = next((key for key in self._left if key in self.held), None)
        if key is None:
            self.silent += 1
            key = next(iter(self.held))
        del self.held[key]
        self.graph.forget(key)
        return key


POLICIES = {
    "first in, first out": lambda: Order(by_use=False),
    "least recently used": lambda: Order(by_use=True),
    "system and what two share protected": lambda: Order(by_use=True, ways=2),
    "system and what four share": lambda: Order(by_use=True, ways=4),
    "graph": lambda: Advised(recent=False),
    "graph and recency": lambda: Advised(recent=True),
}


def replay(requests, policy, capacity):
    seen, found, read, again, advised, used = set(), 0, 0, 0, set(), [0, 0]
    for request in requests:
        keys = [block.key for block in request.blocks]
        leading = next((i for i, key in enumerate(keys) if key not in policy.held), len(keys))
        missed = keys[leading:]
        found, read = found + leading, read + len(missed)
        again += sum(key in seen for key in missed)
        used[0] += len(advised & set(missed))
        seen.update(keys)
        policy.note(request.blocks, request.at)
        while len(policy.held) > capacity:
            policy.leave(request.at)
        if isinstance(policy, Advised):
            advised = set(policy.graph.suggest_prefetch(keys, policy.held, PREFETCHED))
            used[1] += len(advised)
    figure = {"hit_rate": round(found / (found + read), 4), "read": TOKENS * read, "read_again": TOKENS * again}
    if isinstance(policy, Advised):
        figure |= {"prefetched": used[1], "prefetched_used": used[0], "asked": policy.asked, "silent": policy.silent}
    return figure


def cost(nodes, seconds=6):
    """Return the advisor's share of a core, and the milliseconds of a ranking, with so many blocks."""
    graph = KVCacheGraph(recent=True)
    blocks = [Block(os.urandom(16), "user", f"{n} {n % 97} {n % 31}") for n in range(nodes)]
    for start in range(0, nodes, 64):
        graph.note(blocks[start : start + 64], time.monotonic())
    advisor = Advisor(graph)
    advisor.start()
    time.sleep(seconds)
    advisor.close()
    ranking = 1000 * advisor.busy / advisor.rankings
    return {"blocks": nodes, "ms": round(ranking, 1), "share": round(advisor.busy / seconds, 4)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--costs", type=int, nargs="*", default=[1_000, 4_000, 16_000])
    parser.add_argument("--only", help="a trace; the figures of the others stay")
    args = parser.parse_args()
    figures = json.loads((RESULTS / "store_graph.json").read_text())["figures"] if args.only else []
    figures = [figure for figure in figures if figure["trace"] != args.only]
    for name, requests in traces(args.data).items():
        if args.only not in (None, name):
            continue
        distinct = len({block.key for request in requests for block in request.blocks})
        for share in SHARES:
            for policy, make in POLICIES.items():
                about = {"trace": name, "requests": len(requests), "blocks": distinct, "share": share, "policy": policy}
                figures.append({**about, **replay(requests, make(), int(share * distinct))})
                print(json.dumps(figures[-1]), flush=True)
    costs = [cost(nodes) for nodes in args.costs]
    print(json.dumps(costs))
    save("store_graph.json", "python -m benchmarks.store.bench_graph --data DIR", figures=figures, costs=costs)


if __name__ == "__main__":
    main()
