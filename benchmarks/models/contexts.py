"""Draw training contexts with a weight for each token: conversations about planted facts, copied spans, plain text."""

import gzip
import json
import random
from itertools import chain
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.models.facts import Fact, draw

ANSWER, COPY, TEXT, FRAME, HAY, QUESTION = 4.0, 2.0, 1.0, 0.5, 0.3, 0.1
# Style of a conversation, out of ten: a plain prompt, context recovered into a system message, or a chat.
_PLAIN, _RECOVERED, _STYLES = 2, 2, 10

Weighted = tuple[list[int], list[float]]


class Contexts:
    """Draws contexts of T + 1 tokens from a gzipped file of JSON lines with a field `text`."""

    def __init__(self, documents: Path, tokenizer: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(tokenizer))
        self.end, self.start_turn, self.end_turn = map(
            self.tokenizer.token_to_id, ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
        )
        self.vocabulary = self.tokenizer.get_vocab_size()
        with gzip.open(documents, "rt", encoding="utf8") as lines:
            texts = [json.loads(line)["text"] for line in lines]
        encoded = [found.ids for found in self.tokenizer.encode_batch(texts)]
        self.long = [ids for ids in encoded if len(ids) > 300]
        random.Random(0).shuffle(encoded)
        self.flat = list(chain.from_iterable([*ids, self.end] for ids in encoded))

    def draw(self, rng: random.Random, tokens: int, text: float, copies: float) -> Weighted:
        """Draw plain text with probability `text`, copied spans with probability `copies`, else a conversation."""
        if rng.random() < copies:
            return self._copies(rng, tokens)
        if rng.random() < text:
            start = rng.randrange(len(self.flat) - tokens - 1)
            return self.flat[start : start + tokens + 1], [TEXT] * (tokens + 1)
        ids, weights = self.chat(rng, tokens)
        while len(ids) < tokens + 1:
            more, further = self.chat(rng, max(120, tokens + 1 - len(ids)))
            ids, weights = [*ids, self.end, *more], [*weights, 0.0, *further]
        return ids[: tokens + 1], weights[: tokens + 1]

    def chat(self, rng: random.Random, tokens: int) -> Weighted:
        """Return a conversation of about `tokens` tokens: facts planted in text, then questions."""
        count = rng.choice([1, 2, 3, 4]) if tokens <= 128 else rng.choice([1, 1, 2, 3, 4, 6, 8, 12, 16])
        used: set[tuple[str, ...]] = set()
        facts = [fact for _ in range(count) if (fact := draw(rng, used)) is not None]
        asked = min(len(facts) + rng.choice([0, 1, 2]), rng.choice([2, 4, 8, 16])) or 1
        turns = [rng.choice(facts) for _ in range(asked)] if asked > len(facts) else rng.sample(facts, asked)
        style = rng.randrange(_STYLES)
        planted = [self._spaced(rng, fact) for fact in facts]
        tail = 40 + sum(len(self._ids(fact.question)) + len(self._ids(fact.answer)) + 14 for fact in turns)
        hay = max(8, tokens - tail - sum(map(len, planted)) - 20)
        if tokens <= 128:
            hay = rng.randint(4, hay)
        elif rng.random() < 0.15:
            hay = rng.randint(20, hay) if hay > 20 else hay
        text = self._hay(rng, hay)
        body = self._plant(rng, text, planted)
        if style < _PLAIN:
            return self._plain(body, turns[0])
        if style == _RECOVERED:
            return self._recovered(rng, text[: max(20, hay // 2)], turns[0])
        return self._conversation(rng, body, turns)

    def _plain(self, body: list[int], fact: Fact) -> Weighted:
        return _join(
            (body, HAY),
            (self._ids("\n\n" + fact.question), QUESTION),
            (self._ids(" " + fact.answer), ANSWER),
            ([self.end], TEXT),
        )

    def _recovered(self, rng: random.Random, text: list[int], fact: Fact) -> Weighted:
        """Return a conversation with a system message of earlier spans, one of which holds the fact."""
        count = rng.choice([1, 2, 4])
        spans = []
        for number in range(count):
            span = self._hay(rng, rng.randint(20, 60))
            if number == 0:
                place = rng.randrange(len(span))
                span = span[:place] + self._ids(f" {fact.sentence} ") + span[place:]
            spans.append(span)
        rng.shuffle(spans)
        recovered = self._ids("[Recovered context from earlier in this session]")
        for span in spans:
            recovered += self._ids("\n--- evicted span ---\n") + span
        return _join(
            (self._turn("user", text), HAY),
            (self._turn("assistant", self._ids("OK")), HAY),
            (self._turn("system", recovered), HAY),
            *self._questions([fact]),
        )

    def _conversation(self, rng: random.Random, body: list[int], turns: list[Fact]) -> Weighted:
        if rng.random() < 0.5:
            head = [(self._turn("user", body), HAY), (self._turn("assistant", self._ids("OK")), FRAME)]
            return _join(*head, *self._questions(turns))
        first, *others = turns
        whole = body + self._ids("\n\n" + first.question)
        return _join((self._turn("user", whole), HAY), *self._answer(first), *self._questions(others))

    def _questions(self, turns: list[Fact]) -> list[tuple[list[int], float]]:
        return [
            part
            for fact in turns
            for part in ((self._turn("user", self._ids(fact.question)), QUESTION), *self._answer(fact))
        ]

    def _answer(self, fact: Fact) -> list[tuple[list[int], float]]:
        opening = [self.start_turn, *self._ids("assistant\n")]
        return [(opening, HAY), ([*self._ids(fact.answer), self.end_turn, *self._ids("\n")], ANSWER)]

    def _copies(self, rng: random.Random, tokens: int) -> Weighted:
        """Repeat spans of random tokens or of text, which teaches a model to look back."""
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < tokens + 1:
            length = rng.randint(4, 40)
            noise = rng.random() < 0.5
            span = [rng.randrange(3, self.vocabulary) for _ in range(length)] if noise else self._hay(rng, length)
            gap = [rng.randrange(3, self.vocabulary) for _ in range(rng.randint(0, 12))]
            ids += [*span, *gap, *span, self.end]
            # The first two tokens of the copy cannot be known.
            weights += [QUESTION] * (length + len(gap) + 2) + [COPY] * (length - 2) + [FRAME]
        return ids[: tokens + 1], weights[: tokens + 1]

    def _hay(self, rng: random.Random, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            document = rng.choice(self.long)
            start = rng.randrange(max(1, len(document) - 50))
            found += document[start : start + min(count - len(found), rng.randint(100, 1500))]
        return found[:count]

    def _plant(self, rng: random.Random, text: list[int], planted: list[list[int]]) -> list[int]:
        places = sorted(rng.randrange(len(text) + 1) for _ in planted)
        body: list[int] = []
        for fact, start, stop in zip(planted, [0, *places], places, strict=False):
            body += text[start:stop] + fact
        return body + text[places[-1] :]

    def _spaced(self, rng: random.Random, fact: Fact) -> list[int]:
        before, after = (" " if rng.random() < 0.8 else "\n" for _ in range(2))
        return self._ids(before + fact.sentence + after)

    def _turn(self, role: str, ids: list[int]) -> list[int]:
        return [self.start_turn, *self._ids(role + "\n"), *ids, self.end_turn, *self._ids("\n")]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)


def _join(*parts: tuple[list[int], float]) -> Weighted:
    ids = [token for tokens, _ in parts for token in tokens]
    return ids, [weight for tokens, weight in parts for _ in tokens]
