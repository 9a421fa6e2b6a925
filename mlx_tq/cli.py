"""`mlx_tq COMMAND`, or a script called `mlx_tq.COMMAND`: find the command, run it, turn errors into exit codes.

0 done, 1 a run that failed, 2 a request that cannot be met, 130 Ctrl-C.
"""

import importlib
import os
import sys
import warnings
from pathlib import Path

from mlx_tq import __version__
from mlx_tq.errors import ConfigError, MlxTqError

COMMANDS = {
    "generate": "generate text on a compressed KV cache",
    "server": "serve OpenAI's API on compressed KV caches",
    "chat": "a conversation in the terminal, with what left the cache brought back",
    "cache_prompt": "read a prompt once and save its cache",
    "evaluate": "measure quality: perplexity, divergence, needles, formats",
    "calibrate": "gather a model's query statistics for eviction into a file",
    "bench": "measure speed against mlx-lm",
    "doctor": "show versions and backend, and test every codec",
    "demo": "a fact that outgrows its cache, evicted and brought back",
}
USAGE_ERROR = 2
INTERRUPTED = 130


def _usage() -> str:
    lines = [f"  {name:14}{what}" for name, what in COMMANDS.items()]
    return "\n".join(["usage: mlx_tq COMMAND [options]", "", *lines, "", "mlx_tq COMMAND --help shows its options."])


def _command_of_script(script: str) -> str | None:
    """The command of a script `mlx_tq.COMMAND`, which Windows calls `mlx_tq.COMMAND.exe`."""
    package, _, command = Path(script).name.removesuffix(".exe").partition(".")
    return command if package == "mlx_tq" and command else None


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    command = _command_of_script(sys.argv[0]) if argv is None else None
    words = sys.argv[1:] if argv is None else argv
    if command is None:
        command, words = (words[0], words[1:]) if words else ("", [])
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115  whoever started us may have closed it
    try:
        try:
            return _run(command, words)
        finally:
            sys.stdout.flush()
    except MlxTqError as error:
        sys.stderr.write(f"mlx_tq {command}: {error}\n")
        return USAGE_ERROR if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output left
        _give_up_output()
        return 1
    except OSError as error:  # a full disk, say, behind our output
        _give_up_output()
        sys.stderr.write(f"mlx_tq {command}: {error}\n")
        return 1


def _give_up_output() -> None:
    """Do not let the interpreter complain at exit of what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(command: str, words: list[str]) -> int:
    if command in ("--version", "-V"):
        sys.stdout.write(f"{__version__}\n")
        return 0
    if command in ("--help", "-h"):
        sys.stdout.write(f"{_usage()}\n")
        return 0
    if command not in COMMANDS:
        sys.stderr.write(f"mlx_tq: command {command!r} is unknown\n" if command else "")
        sys.stderr.write(f"{_usage()}\n")
        return USAGE_ERROR
    from mlx_tq.args import check_environment, choose_impl  # 0.1 s, only for a command

    module = importlib.import_module(f"mlx_tq.{command}")
    args = module.build_parser().parse_args(words)
    check_environment()
    choose_impl(args)
    plain, warnings.formatwarning = warnings.formatwarning, lambda message, *_, **__: f"warning: {message}\n"
    try:
        return int(module.run(args))
    finally:
        warnings.formatwarning = plain
