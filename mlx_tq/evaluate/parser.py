"""The flags of `mlx_tq.evaluate`."""

import argparse

from mlx_tq.args import add_cache_arguments
from mlx_tq.evaluate import needle, perplexity
from mlx_tq.evaluate.arms import add_arm_arguments
from mlx_tq.evaluate.scenes import KINDS
from mlx_tq.evaluate.settings import DEFAULT_VARIANTS
from mlx_tq.models import DTYPES


def build_parser() -> argparse.ArgumentParser:
    """One subcommand for each measurement."""
    parser = argparse.ArgumentParser(
        prog="mlx_tq.evaluate", description="Measure what a compressed KV cache costs in quality."
    )
    commands = parser.add_subparsers(dest="measurement", required=True, metavar="MEASUREMENT")

    def add(name: str, what: str, default_arms: str | None) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=what, description=what)
        made.add_argument("--model", help="folder or hub name (default: the embedded model)")
        made.add_argument("--trust-remote-code", action="store_true", help="let the tokenizer run its own code")
        made.add_argument("--dtype", choices=DTYPES, help="type to compute in (default: that of the model's weights)")
        made.add_argument("--text", metavar="FILE", help="text to read (default: WikiText-2's test split, an excerpt)")
        made.add_argument(
            "--json", metavar="FILE", help="write the results here too; - is stdout, instead of the table"
        )
        if default_arms is not None:
            add_arm_arguments(made, default_arms)
        add_cache_arguments(made)
        return made

    for name, what, arms in (
        ("perplexity", "perplexity of a text, against the fp16 cache", perplexity.DEFAULT_ARMS),
        ("divergence", "KL divergence and top-1 agreement with the fp16 cache", perplexity.DEFAULT_ARMS),
        ("formats", "every pair of formats: bytes, errors, divergence, perplexity", None),
    ):
        made = add(name, what, arms)
        made.add_argument("--chunks", type=int, default=3, help="pieces of the text (default: 3)")
        made.add_argument("--length", type=int, default=2048, help="tokens of each (default: 2048)")
        made.add_argument("--step", type=int, default=512, help="tokens read at a time (default: 512)")
        if name == "formats":
            made.add_argument("--keys", help="formats of keys, as tq4 or tq4:raw, separated by commas")
            made.add_argument("--values", help="formats of values; with --keys, all pairs")
            made.add_argument("--pairs", help="pairs such as q8/tq4,tq35/tq3 (default: the sensible ones)")
            made.add_argument("--needles", type=int, default=0, help="to find at each of three depths (default: 0)")
            made.add_argument("--needle-length", type=int, default=1000, help="tokens around them (default: 1000)")

    made = add("needle", "find a fact planted in a long text", needle.DEFAULT_ARMS)
    made.add_argument("--lengths", default="1000,2000", help="tokens of the prompts (default: 1000,2000)")
    made.add_argument(
        "--depths", default="start,middle,end", help="start, middle, end or 0 to 1 (default: those three)"
    )
    made.add_argument("--seeds", type=int, default=3, help="cases for each length and depth (default: 3)")
    made.add_argument("--step", type=int, default=512, help="tokens read at a time (default: 512)")
    made.add_argument("--max-tokens", type=int, default=64, help="of an answer (default: 64)")
    made.add_argument("--strict", action="store_true", help="exit with 1 if a compressed cache misses a needle")

    made = add("layers", "layer by layer against a reference: codes, hidden states, predictions", "balanced")
    made.add_argument(
        "--against",
        default="off",
        metavar="WHAT",
        help="off (fp16), a profile or a pair; ops (the same on mlx's operations), or float32 (the same model in it) "
        "(default: off)",
    )
    made.add_argument("--length", type=int, default=512, help="tokens of the text (default: 512)")
    made.add_argument("--step", type=int, default=128, help="tokens read at a time (default: 128)")

    made = add("spectrum", "what the strongest RoPE pairs of keys hold, and spectral schedules from it", None)
    made.add_argument("--length", type=int, default=1024, help="tokens of the text (default: 1024)")

    made = add("drift", "what the number of tokens read at a time changes", "balanced")
    made.add_argument("--length", type=int, default=2048, help="tokens of the text (default: 2048)")
    made.add_argument("--steps", default="7,32,128,512,2048", help="tokens read at a time (default: 7,32,128,512,2048)")

    made = add("sweep", "evict at many settings: a text predicted, needles found, needle tokens that survived", None)
    made.add_argument(
        "--policies",
        default=DEFAULT_VARIANTS,
        help="modes of TriAttention and other policies, with "
        "options as in v3:evict=highest:nope=off (default: %(default)s)",
    )
    made.add_argument(
        "--retentions",
        default="95,90,85,80,75,65,50,25,10",
        help="percent of the tokens seen that stay (default: %(default)s)",
    )
    for flag, default, what in (
        ("--granularities", "1", "tokens that leave together: 1, 8, 16, 32, 64"),
        ("--triggers", "128", "tokens above the budget at which a round begins, such as 128,512,2048"),
        ("--prefixes", "128", "first tokens that stay, such as 0,128,256; modes v1 and v2 always take 0"),
        ("--kinds", ",".join(KINDS), "of needles"),
        ("--lengths", "2048", "tokens of the prompts"),
        ("--depths", "start,middle,end", "start, middle, end or 0 to 1"),
    ):
        made.add_argument(flag, default=default, help=f"{what} (default: {default})")
    made.add_argument(
        "--once",
        action="store_true",
        help="needles: read each text once for all settings and evict in one round before the question",
    )
    for flag, number, what in (
        ("--warmup", 1024, "tokens whose queries calibrate TriAttention; nothing is evicted before"),
        ("--seeds", 3, "scenes for each kind, length and depth; 0 for no needles"),
        ("--chunks", 3, "pieces of the text; 0 for no text"),
        ("--length", 2048, "tokens of each"),
        ("--step", 128, "tokens read at a time"),
        ("--max-tokens", 64, "of an answer"),
    ):
        made.add_argument(flag, type=int, default=number, help=f"{what} (default: {number})")
    return parser
