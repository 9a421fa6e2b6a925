"""Train a needle model on a CPU; stops after MINUTES and resumes from OUT/state.pt.

python -m benchmarks.models.train hybrid|latent DOCUMENTS TOKENIZER OUT [--minutes 70] [--threads 2]
"""

import argparse
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  its usual name
from torch import Tensor, nn

from benchmarks.models.contexts import ANSWER, COPY, TEXT, Contexts
from benchmarks.models.hybrid import Hybrid, Shape
from benchmarks.models.latent import Latent, LatentShape

RATE = 2e-3
SCORED = 1280  # tokens of a step whose logits are computed: those that weigh most, and a sample of the others
SEED = 1234


@dataclass(frozen=True)
class Stage:
    """Contexts of one length; ends when answers cost less than `enough` nats, or at `until` of the whole time."""

    tokens: int
    batch: int
    copies: float
    until: float
    enough: float = 0.2


STAGES = (Stage(128, 16, 0.4, 0.5), Stage(512, 4, 0.1, 0.75), Stage(1024, 2, 0.05, 1.0, 0.0))


@dataclass
class Progress:
    """Where training stands: minutes spent, and running means of the loss by kind of token."""

    stage: int = 0
    step: int = 0
    tokens: int = 0
    minutes: float = 0.0
    answers: float = math.nan
    copies: float = math.nan
    text: float = math.nan

    def mean(self, name: str, losses: Tensor, weights: Tensor, weight: float) -> None:
        chosen = losses[weights == weight]
        if len(chosen):
            before, now = getattr(self, name), float(chosen.mean())
            setattr(self, name, now if math.isnan(before) else 0.95 * before + 0.05 * now)


def losses(model: nn.Module, contexts: list[tuple[list[int], list[float]]]) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of the scored tokens of a batch, and their weights."""
    ids = torch.tensor([ids for ids, _ in contexts])
    weights = torch.tensor([weights for _, weights in contexts])[:, 1:].flatten()
    wanted = (torch.rand(len(weights)) + 2 * (weights >= COPY)).topk(min(SCORED, len(weights))).indices
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids[:, :-1], wanted).float()
    return F.cross_entropy(logits, ids[:, 1:].flatten()[wanted], reduction="none"), weights[wanted]


def make_model(kind: str, vocabulary: int) -> Hybrid | Latent:
    return Hybrid(Shape(vocabulary)) if kind == "hybrid" else Latent(LatentShape(vocabulary))


def train(kind: str, contexts: Contexts, out: Path, minutes: float) -> None:
    torch.manual_seed(0)
    model = make_model(kind, contexts.vocabulary)
    decayed = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True)
    now = Progress()
    path = out / "state.pt"
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        now = Progress(**state["progress"])
    for layer in model.layers:
        layer.compile(dynamic=False)  # layers of a kind share one compiled graph
    rng = random.Random(SEED + now.step)
    began, saved = time.monotonic() - 60 * now.minutes, time.monotonic()
    while now.minutes < minutes:
        share = now.minutes / minutes
        stage = STAGES[now.stage]
        if now.stage + 1 < len(STAGES) and (share > stage.until or now.answers < stage.enough):
            now.stage, now.answers = now.stage + 1, math.nan
            continue
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (now.step + 1) / 100) * (0.05 + 0.475 * (1 + math.cos(math.pi * share)))
        drawn = [contexts.draw(rng, stage.tokens, 0.2, stage.copies) for _ in range(stage.batch)]
        loss, weights = losses(model, drawn)
        optimizer.zero_grad()
        ((loss * weights).sum() / weights.sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        now.step += 1
        now.tokens += stage.batch * stage.tokens
        now.minutes = (time.monotonic() - began) / 60
        for name, weight in (("answers", ANSWER), ("copies", COPY), ("text", TEXT)):
            now.mean(name, loss.detach(), weights, weight)
        if time.monotonic() - saved > 60 or now.minutes >= minutes:
            saved = time.monotonic()
            print(now, flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": vars(now)}
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("hybrid", "latent"))
    parser.add_argument("documents", type=Path, help="gzipped JSON lines with a field text")
    parser.add_argument("tokenizer", type=Path, help="tokenizer.json")
    parser.add_argument("out", type=Path, help="folder of the state")
    parser.add_argument("--minutes", type=float, default=70)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    train(args.model, Contexts(args.documents, args.tokenizer), args.out, args.minutes)


if __name__ == "__main__":
    main()
