"""What leaves a store of prefixes: the graph's advice beside least recently used and first in, first out.

Each trace is replayed against stores that hold a tenth, a quarter and half of all of its blocks. A prompt finds its
leading blocks that are held; the others are read, and held then. Read again: tokens that had been held before. The
graph ranks every half second of the trace's time; where its 256 have left already, the first in is the first out.

python -m benchmarks.store.bench_graph --data DIR     (DIR holds qmsum/ and longeval/; without it, the agents alone)
"""

import argparse
import json
import os
import time
from collections import OrderedDict, defaultdict
from pathlib import Path

from benchmarks.reports import RESULTS, save
from benchmarks.store.graph import EVERY, Advisor, KVCacheGraph
from benchmarks.store.traces import TOKENS, Block, traces

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
