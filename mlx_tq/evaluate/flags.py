"""The flags of `mlx_tq.evaluate`."""

import argparse

from mlx_tq.cli.args import add_cache_arguments
from mlx_tq.cli.model_args import add_model_arguments
from mlx_tq.cli.names import NEEDLE_KINDS
from mlx_tq.cli.parser import command_parser

_PUBLISHED = ("evict=highest", "score_unrotated_dims=on", "evict=highest:score_unrotated_dims=on", "mode=v2", "mode=v1")
_OTHERS = ("random", "recency", "streaming", "knorm")
DEFAULT_VARIANTS = ",".join(["triattention", *(f"published:{options}" for options in _PUBLISHED), *_OTHERS])
_STEP = "tokens read at a time"
_OWN_TEXT = ("reasoning", "tools", "lm-eval")
# Of every measurement: what it is, and what it compares unless --profiles or the cache's flags say.
_MEASUREMENTS = {
    "perplexity": ("perplexity of a text, against the fp16 cache", "off,safe,balanced,small"),
    "divergence": ("KL divergence and top-1 agreement with the fp16 cache", "off,safe,balanced,small"),
    "formats": ("every pair of formats: bytes, errors, divergence, perplexity", None),
    "needle": ("find a fact planted in a long text", "balanced,small"),
    "layers": ("layer by layer against a reference: codes, hidden states, predictions", "balanced"),
    "spectrum": ("what the strongest RoPE pairs of keys hold, and spectral schedules from it", None),
    "drift": ("what the number of tokens read at a time changes", "balanced"),
    "reasoning": ("problems in GSM8K's format, answered on each cache and on the fp16 one", "balanced,small"),
    "tools": ("functions called as a file expects it, on each cache and on the fp16 one", "balanced,small"),
    "ruler": ("tasks over long texts like RULER's, on each cache and on the fp16 one", "balanced,small"),
    "lm-eval": ("mlx-lm's own evaluation on compressed caches: tasks of lm-eval behind --, then its flags", None),
    "sweep": ("evict at many settings: a text predicted, needles found, needle tokens that survived", None),
}


def build_parser() -> argparse.ArgumentParser:
    """One subcommand for each measurement."""
    parser = command_parser("evaluate", "Measure what a compressed KV cache costs in quality.")
    parser.set_defaults(others=[])  # what stands behind --
    commands = parser.add_subparsers(dest="measurement", required=True, metavar="MEASUREMENT")
    made = {}
    for name, (what, arms) in _MEASUREMENTS.items():
        made[name] = commands.add_parser(name, help=what, description=what)
        add_model_arguments(made[name], adapter=False)
        add = made[name].add_argument
        if name not in _OWN_TEXT:
            add("--text", metavar="FILE", help="text to read (default: WikiText-2's test split, an excerpt)")
        if name != "lm-eval":
            add(
                "--json",
                metavar="FILE",
                help="write the results here too; - is stdout, instead (default: a table alone)",
            )
        if arms is not None:
            add_arm_arguments(made[name], arms)
        add_cache_arguments(made[name])
    for name in ("perplexity", "divergence", "formats"):
        _add_numbers(made[name], chunks=(3, "pieces of the text"), length=(2048, "tokens of each"), step=(512, _STEP))
    _add_formats(made["formats"])
    _add_needle(made["needle"])
    made["layers"].add_argument(
        "--against",
        default="off",
        metavar="WHAT",
        help="off (fp16), a profile or a pair; reference (the reference implementation), or float32 (the model in it)",
    )
    _add_numbers(made["layers"], length=(512, "tokens of the text"), step=(128, _STEP))
    _add_numbers(made["spectrum"], length=(1024, "tokens of the text"))
    _add_numbers(made["drift"], length=(2048, "tokens of the text"))
    made["drift"].add_argument("--steps", default="7,32,128,512,2048", metavar="N,...", help=_STEP)
    _add_sweep(made["sweep"])
    _add_asked(made)
    return parser


def _add_asked(made: dict[str, argparse.ArgumentParser]) -> None:
    reasoning, tools, ruler = made["reasoning"], made["tools"], made["ruler"]
    reasoning.add_argument(
        "--data", required=True, metavar="FILE", help="JSON lines with question and answer, as GSM8K"
    )
    reasoning.add_argument("--ignore-chat-template", action="store_true", help="ask in running text")
    tools.add_argument("--data", metavar="FILE", help="functions and cases (default: those inside the package)")
    tools.add_argument(
        "--tool-parser",
        metavar="NAME",
        help="of mlx-lm, such as json_tools, for a model whose template knows no functions (default: the model's own)",
    )
    ruler.add_argument("--tasks", default="needles,variables,common,frequent", metavar="A,...", help="to set")
    ruler.add_argument("--lengths", default="1000,2000", metavar="N,...", help="tokens of the prompts")
    _add_numbers(reasoning, shots=(5, "problems shown worked: the first of the file"), seeds=(1, "orders of them"))
    _add_numbers(tools, shots=(0, "cases shown with their calls: the first of the file"))
    for parser, samples, tokens in ((reasoning, 100, 512), (tools, 100, 200), (ruler, 5, 80)):
        each = "samples of each task and length" if parser is ruler else "to ask at most"
        _add_numbers(parser, samples=(samples, each), max_tokens=(tokens, "of an answer"), step=(512, _STEP))
        parser.add_argument("--temp", type=float, default=0.0, metavar="T", help="of sampling; 0 takes the likeliest")


def add_arm_arguments(parser: argparse.ArgumentParser, default: str) -> None:
    """Add --profiles; `default` is what is compared without it and without flags of the cache."""
    parser.add_argument(
        "--profiles",
        metavar="A,B,...",
        help="what to compare: profiles, or pairs such as q8/tq4, with a scale rule as in tq4:raw/fp16, without "
        "normalized keys as in tq4:plain/tq4, with eviction to a budget as in off@90%% (then the others keep all) "
        f"(default: {default}, or what the --kv flags say)",
    )
    parser.set_defaults(default_profiles=default)


def _add_numbers(parser: argparse.ArgumentParser, **numbers: tuple[int, str]) -> None:
    """Add whole numbers by name, each with its default and what it is."""
    for name, (default, what) in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, metavar="N", help=what)


def _add_formats(parser: argparse.ArgumentParser) -> None:
    formats = "formats of keys, as tq4 or tq4:raw, separated by commas (default: tq4 with --values)"
    parser.add_argument("--keys", metavar="A,B,...", help=formats)
    parser.add_argument(
        "--values", metavar="A,B,...", help="formats of values; all pairs of both (default: tq4 with --keys)"
    )
    pairs = "pairs such as q8/tq4,tq35/tq3 (default: the sensible ones)"
    parser.add_argument("--pairs", metavar="A/B,...", help=pairs)
    _add_numbers(
        parser,
        needles=(0, "to find at each of three depths"),
        needle_length=(1000, "tokens around them"),
    )


def _add_needle(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", default="1000,2000", metavar="N,...", help="tokens of the prompts")
    parser.add_argument("--depths", default="start,middle,end", metavar="A,...", help="start, middle, end or 0 to 1")
    _add_numbers(
        parser,
        seeds=(3, "cases for each length and depth"),
        step=(512, _STEP),
        max_tokens=(64, "of an answer"),
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a compressed cache misses a needle")


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    for flag, default, what in (
        (
            "--policies",
            DEFAULT_VARIANTS,
            "with options as --kv-evict takes them, such as published:evict=highest",
        ),
        ("--retentions", "95,90,85,80,75,65,50,25,10", "percent of the tokens seen that stay"),
        ("--granularities", "1", "tokens that leave together: 1, 8, 16, 32, 64"),
        ("--triggers", "128", "tokens above the budget at which a round begins, such as 128,512,2048"),
        ("--prefixes", "128", "first tokens that stay, such as 0,128,256; modes v1 and v2 always take 0"),
        ("--kinds", ",".join(NEEDLE_KINDS), "of needles"),
        ("--lengths", "2048", "tokens of the prompts"),
        ("--depths", "start,middle,end", "start, middle, end or 0 to 1"),
    ):
        parser.add_argument(flag, default=default, metavar="A,B,...", help=what)
    parser.add_argument(
        "--once",
        action="store_true",
        help="needles: read each text once for all settings and evict in one round before the question",
    )
    _add_numbers(
        parser,
        warmup=(1024, "tokens whose queries calibrate TriAttention; nothing is evicted before"),
        seeds=(3, "scenes for each kind, length and depth; 0 for no needles"),
        chunks=(3, "pieces of the text; 0 for no text"),
        length=(2048, "tokens of each"),
        step=(128, _STEP),
        max_tokens=(64, "of an answer"),
    )
