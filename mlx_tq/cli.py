"""`mlx_tq COMMAND`, or a script called `mlx_tq.COMMAND`: find the command, run it, turn errors into exit codes.

0 done, 1 a run that failed, 2 a request that cannot be met, 130 Ctrl-C.
"""

import importlib
import os
import sys
from pathlib import Path

from mlx_tq import __version__
from mlx_tq.errors import ConfigError, MlxTqError

COMMANDS = {
    "generate": "generate text on a compressed KV cache",
    "cache_prompt": "read a prompt once and save its cache",
    "evaluate": "measure quality: perplexity, divergence, needles, formats",
    "bench": "measure speed against mlx-lm",
    "doctor": "show versions and backend, and test every codec",
    "demo": "answer a question about a long text, at fp16 and compressed",
}
INTERRUPTED = 130


def _usage() -> str:
    lines = [f"  {name:14}{what}" for name, what in COMMANDS.items()]
    return "\n".join(["usage: mlx_tq COMMAND [options]", "", *lines, "", "mlx_tq COMMAND --help shows its options."])


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    _, dot, command = Path(sys.argv[0]).stem.partition(".") if argv is None else ("", "", "")
    if not dot:
        command, words = (words[0], words[1:]) if words else ("--help", [])
    if command in ("--version", "-V"):
        print(__version__)  # noqa: T201  this is what was asked for
        return 0
    if command in ("--help", "-h"):
        print(_usage())  # noqa: T201
        return 0
    if command not in COMMANDS:
        sys.stderr.write(f"mlx_tq: command {command!r} is unknown\n{_usage()}\n")
        return 2
    module = importlib.import_module(f"mlx_tq.{command}")
    args = module.build_parser().parse_args(words)
    try:
        return int(module.run(args))
    except MlxTqError as error:
        sys.stderr.write(f"mlx_tq {command}: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output left; do not let the interpreter complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
