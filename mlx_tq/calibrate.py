"""`mlx_tq.calibrate`: collect statistics of a model's queries, by which eviction policies predict attention."""

import argparse
import sys

from mlx_tq.cli.options import check_flags, check_writable
from mlx_tq.cli.parser import CommandParser, add_model_arguments, command_parser
from mlx_tq.cli.runner import DONE, command_main
from mlx_tq.errors import ConfigError


def build_parser() -> CommandParser:
    parser = command_parser("calibrate", "Calibrate eviction for a model and a --dtype (--kv-calibration).")
    add_model_arguments(parser, adapter=False)
    add = parser.add_argument
    add("--text", metavar="FILE", help="text to calibrate on (default: an excerpt of WikiText-2's test split)")
    add("--tokens", type=int, metavar="N", help="tokens of the text to use (default: 4096)")
    share = "weight of the text; the rest is generated questions about it: 0 is questions only, 1 is text only"
    add("--text-share", type=float, metavar="SHARE", help=f"{share} (default: 0.25)")
    add("--covariance", action="store_true", help="include the covariance, for --kv-evict expected_attention")
    losses = "measure each layer's loss on the text instead, for --kv-mean-bits; saved in the user's cache folder"
    add("--losses", action="store_true", help=losses)
    heads = "measure instead which KV heads need distant tokens, for --kv-evict heads; saved in the same folder"
    add("--heads", action="store_true", help=heads)
    output = "safetensors file to write (default: the file in the user's cache folder that --kv-calibration auto uses)"
    add("-o", "--output", metavar="FILE", help=output)
    return parser


def run(args: argparse.Namespace) -> int:
    check_flags(args)
    if args.tokens is not None and args.tokens < 1:
        raise ConfigError(f"--tokens is {args.tokens}; it must be 1 or more, such as 4096.")
    if args.text_share is not None and not 0 <= args.text_share <= 1:
        raise ConfigError(f"--text-share is {args.text_share:g}; it must be from 0 (questions only) to 1 (text only).")
    if args.output is not None:
        check_writable("-o", args.output)

    from mlx_tq.cli.inputs import read_text
    from mlx_tq.cli.startup import check_model, note_loading
    from mlx_tq.policies.calibration import SKIP, check_replaceable

    if args.output is not None:
        check_replaceable(args.output)
    text = read_text(args.text)
    check_model(args)
    note_loading(args)

    from mlx_tq.cli import model_calibration
    from mlx_tq.cli.head_calibration import save_head_scores
    from mlx_tq.cli.loading import load_model
    from mlx_tq.cli.screen import prefill_progress
    from mlx_tq.models import fingerprint, short_name
    from mlx_tq.prompt_cache.measurements import calibration_path, make_folder

    tokens = model_calibration.TOKENS if args.tokens is None else args.tokens
    share = model_calibration.TEXT_SHARE if args.text_share is None else args.text_share
    model, tokenizer = load_model(args)
    if args.losses:
        model_calibration.save_measured_losses(model, tokenizer, text, short_name(args.model))
        return DONE
    if args.heads:
        save_head_scores(model, tokenizer, text, short_name(args.model))
        return DONE
    path = args.output
    if path is None:
        path = calibration_path(fingerprint(model), covariance=args.covariance)
        make_folder(path)
        check_replaceable(path)
    with prefill_progress(title="Calibrating") as progress:
        options = {"covariance": args.covariance, "progress": progress}
        if share == 1:
            ids = list(tokenizer.encode(text, add_special_tokens=False, verbose=False))[: tokens + SKIP]
            queries = model_calibration.calibrate_on_text(model, ids, **options)
            source = f"{queries.tokens:,} tokens of text"
        else:
            collected = model_calibration.collect_queries(model, tokenizer, text, tokens, **options)
            queries = model_calibration.mix_queries(*collected, share)
            source = f"{queries.tokens:,} tokens of questions and answers"
            source += f" and {share:.0%} text" if share else ""
    model_calibration.save_queries(model, path, queries)
    sys.stderr.write(f"Saved the calibration ({source}) to {path}\n")
    return DONE


main = command_main(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())
