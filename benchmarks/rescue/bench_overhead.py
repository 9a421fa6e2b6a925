"""What rescue costs a session: the same turns, with the service and without it, one after the other.

    python -m benchmarks.rescue.bench_overhead [--tokens 1000] [--budget 50%] [--rounds 5]

Turn 1 reads a text of the rescue ramp, turn 2 asks for the fact in it. With rescue, what leaves the cache is written to
`mlx-tq-rescue serve` (FAISS, hashing embedder) and a quotation comes back. Without, a session that is handed the very
same quotation for nothing: both read the same tokens over the same cache, so the difference is what spans, writing,
asking and waiting take, and the service's share of the processor. What the quotation's own tokens take to read stands
beside it, and what asking and writing take of the session's own time. Writes benchmarks/results/rescue_overhead.json.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.rescue.bench_ramp import PREFIX, WINDOW, configuration
from benchmarks.rescue.process import service
from mlx_tq import Session, load
from mlx_tq.config import RescueConfig
from mlx_tq.environment import environment
from mlx_tq.haystack import QUESTION, build_case, load_text
from mlx_tq.session import Rehydration

RESULTS = Path(__file__).parents[1] / "results" / "rescue_overhead.json"
ANSWER = 24  # tokens


class Given(Session):
    """A session without a service that has the quotation already."""

    given: Rehydration

    def rehydrate(self, query: str) -> Rehydration:
        """The quotation, at the turn that it was made for."""
        return self.given if query == QUESTION else super().rehydrate(query)


def measure(session: Session, text: str) -> dict[str, Any]:
    """Two turns, and their seconds."""
    memory, writing = session._memory, [0.0]
    write = memory.write

    def clocked() -> None:
        started = time.perf_counter()
        write()
        writing[0] += time.perf_counter() - started

    memory.write = clocked  # type: ignore[method-assign]
    began = time.perf_counter()
    "".join(session.respond(text, max_tokens=ANSWER))
    "".join(session.respond(QUESTION, max_tokens=ANSWER))
    seconds = time.perf_counter() - began
    turn = session.turns[-1]
    return {
        "seconds": seconds,
        "asking_s": turn.rescue_seconds,
        "writing_s": writing[0],
        "prompt_tps": turn.prompt_tps,
        "quoted_tokens": len(turn.rehydration.ids),
        "evicted": session.stats.evicted,
        "said": sum(each.generation_tokens for each in session.turns),
    }


def main() -> None:
    """Measure, in pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    model, tokenizer = load()
    margins = {"prefix": PREFIX, "window": WINDOW + 64}
    case = build_case(tokenizer, load_text(), tokens=args.tokens, depth=0.5, seed=0, **margins, chat=False)
    text, config = tokenizer.decode(case.ids[: case.question]), configuration("rescue", args.budget)
    pairs = []
    with tempfile.TemporaryDirectory() as folder, service(Path(folder), "hashing") as running:
        for _ in range(args.rounds + 1):
            with Session(model, tokenizer, config, rescue=RescueConfig(running.url)) as session:
                rescued = measure(session, text)
                quotation = session.turns[-1].rehydration
            with Given(model, tokenizer, config, warn=lambda _: None) as plain:
                plain.given = quotation
                pairs.append({"rescue": rescued, "given": measure(plain, text)})
            print(json.dumps(pairs[-1]), flush=True)
    pairs = pairs[1:]  # the first warmed up
    share = [pair["rescue"]["seconds"] / pair["given"]["seconds"] - 1 for pair in pairs]
    reading = [p["given"]["quoted_tokens"] / p["given"]["prompt_tps"] / p["given"]["seconds"] for p in pairs]
    report = {
        "command": f"python -m benchmarks.rescue.bench_overhead --tokens {args.tokens} --budget {args.budget} "
        f"--rounds {args.rounds}",
        "environment": environment(),
        "load_average": os.getloadavg()[0],
        "overhead": median(share),
        "overhead_of_each_pair": share,
        "in_the_session": median(
            (p["rescue"]["asking_s"] + p["rescue"]["writing_s"]) / p["rescue"]["seconds"] for p in pairs
        ),
        "reading_the_quotation": median(reading),
        "pairs": pairs,
    }
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    print(
        f"overhead {median(share):+.2%}, in the session {report['in_the_session']:.2%}, quotation {median(reading):.1%}"
    )


if __name__ == "__main__":
    main()
