"""The flags of mlx-lm that several commands take: which model, and how it samples."""

import argparse

from mlx_tq.cli.names import DTYPES


def add_model_arguments(parser: argparse._ActionsContainer, *, adapter: bool = True) -> None:
    """Add --model, --trust-remote-code, --dtype, --dequantize and, where a command takes adapters, --adapter-path."""
    parser.add_argument("--model", help="folder, hub name, .gguf file or smollm2 (default: the embedded model)")
    if adapter:
        parser.add_argument("--adapter-path", help="folder of adapters that mlx_lm.lora made (default: none)")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the tokenizer run its own code")
    parser.add_argument("--dtype", choices=DTYPES, help="type to compute in (default: that of the model's weights)")
    parser.add_argument("--dequantize", action="store_true", help="make packed weights dense: faster on a CPU")


def add_sampling_arguments(group: argparse._ActionsContainer) -> None:
    """Add --temp, --top-p, --top-k and --min-p; greedy without them."""
    group.add_argument("--temp", type=float, default=0.0, help="sampling temperature; 0 is greedy")
    group.add_argument("--top-p", type=float, default=1.0, help="sample among the likeliest tokens of this share")
    group.add_argument("--top-k", type=int, default=0, help="sample among this many tokens; 0 is all")
    group.add_argument("--min-p", type=float, default=0.0, help="least share of the likeliest token's probability")
