"""What happens around every command: flags, environment, and errors turned into exit codes.

0 done, 1 a run that failed, 2 a request that cannot be met, 130 Ctrl-C.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from mlx_tq.commands.args import check_environment, choose_impl
from mlx_tq.commands.foreign_text import readable
from mlx_tq.errors import ConfigError, MlxTqError

DONE, FAILED, USAGE_ERROR, INTERRUPTED = 0, 1, 2, 130


def run_command(command: str, parser: argparse.ArgumentParser, work: str, words: Sequence[str] | None = None) -> int:
    """Read a command's flags and do its work; returns the exit code.

    Args:
        command: its name, for errors.
        parser: of its flags.
        work: the module whose `run` takes the flags. It loads mlx, which takes a second and more, so it is imported
            only once the flags are good; `--help` does without.
        words: of the command line; those of this process without them.
    """

    def run() -> int:
        args = parser.parse_args(words)
        check_environment()
        choose_impl(args)
        plain, warnings.formatwarning = warnings.formatwarning, lambda message, *_, **__: f"warning: {message}\n"
        try:
            return int(import_module(work).run(args))
        finally:
            warnings.formatwarning = plain

    return guarded(command, run)


def guarded(command: str, run: Callable[[], int]) -> int:
    """Run, and tell in one line what went wrong; returns the exit code."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115  whoever started us may have closed it
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()
    except MlxTqError as error:
        sys.stderr.write(f"mlx_tq {command}: {readable(str(error))}\n")
        return USAGE_ERROR if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output left
        _give_up_output()
        return FAILED
    except OSError as error:  # a full disk, say, behind our output
        _give_up_output()
        sys.stderr.write(f"mlx_tq {command}: {readable(str(error))}\n")
        return FAILED


def _give_up_output() -> None:
    """Do not let the interpreter complain at exit of what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
