"""`mlx_tq COMMAND`: find the command and run it."""

import sys
from collections.abc import Sequence
from importlib import import_module

from mlx_tq import __version__
from mlx_tq.cli.frame import DONE, USAGE_ERROR, guarded

COMMANDS = {
    "generate": "generate text on a compressed KV cache",
    "server": "serve OpenAI's API on compressed KV caches",
    "chat": "a conversation in the terminal, with what left the cache brought back",
    "cache_prompt": "read a prompt once and save its cache",
    "evaluate": "measure quality: perplexity, divergence, needles, formats",
    "calibrate": "gather a model's query statistics for eviction into a file",
    "bench": "measure speed against mlx-lm",
    "doctor": "show versions and backend, and test every codec",
    "store": "list, check or clear the store of prefixes",
    "demo": "a fact that outgrows its cache, evicted and brought back",
}


def main(words: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code (see `commands.frame`)."""
    command, *rest = (sys.argv[1:] if words is None else words) or [""]
    if command in COMMANDS:
        return int(import_module(f"mlx_tq.{command}").main(rest))
    return guarded(command, lambda: _without_command(command))


def _without_command(word: str) -> int:
    if word in ("--version", "-V"):
        sys.stdout.write(f"{__version__}\n")
        return DONE
    if word in ("--help", "-h"):
        sys.stdout.write(f"{_usage()}\n")
        return DONE
    sys.stderr.write(f"mlx_tq: command {word!r} is unknown\n" if word else "")
    sys.stderr.write(f"{_usage()}\n")
    return USAGE_ERROR


def _usage() -> str:
    lines = [f"  {name:14}{what}" for name, what in COMMANDS.items()]
    return "\n".join(["usage: mlx_tq COMMAND [options]", "", *lines, "", "mlx_tq COMMAND --help shows its options."])


if __name__ == "__main__":
    sys.exit(main())
