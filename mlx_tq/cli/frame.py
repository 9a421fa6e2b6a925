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

from mlx_tq.cli.args import check_environment, choose_backend
from mlx_tq.cli.foreign_text import readable
from mlx_tq.distributed.launch import exit_now, exit_on_sigterm, is_launched, launched_rank, write_last_line
from mlx_tq.errors import ConfigError, MlxTqError, RankError

DONE, FAILED, USAGE_ERROR, INTERRUPTED = 0, 1, 2, 130
# Commands that several processes run together under `mlx.launch`.
_TOGETHER = ("generate", "chat", "server")
# Of mlx, about a connection to another process.
_BACKENDS = ("[ring]", "[jaccl]", "[mpi]", "[nccl]")


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
        if is_launched():
            _take_place(command, sys.argv[1:] if words is None else words)
        args = parser.parse_args(words)
        check_environment()
        choose_backend(args)
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
        if not (isinstance(error, RankError) and error.on_all_ranks and launched_rank()):
            _tell(command, str(error))
        return USAGE_ERROR if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except RuntimeError as error:
        if not str(error).startswith(_BACKENDS):
            raise
        _tell(command, _gone(error))
        return FAILED
    except BrokenPipeError:  # the reader of our output left
        _give_up_output()
        return FAILED
    except OSError as error:  # a full disk, say, behind our output
        _give_up_output()
        _tell(command, str(error))
        return FAILED


def end_rank(command: str, error: Exception) -> None:
    """End at once, from any thread, a process that others of its kind wait for, with the line that says why."""
    if isinstance(error, RuntimeError) and str(error).startswith(_BACKENDS):
        exit_now(_line(command, _gone(error)))
    exit_now(_line(command, str(error) if isinstance(error, MlxTqError) else repr(error)))


def _gone(error: RuntimeError) -> str:
    return f"another rank has ended, or cannot be reached any more ({error})."


def _take_place(command: str, words: Sequence[str]) -> None:
    """Get ready to run with others: the first rank alone writes to stdout, and each says in a line why it ends.

    Raises:
        ConfigError: the command runs in one process, or is asked to divide the model as mlx-lm also can.
    """
    if launched_rank():
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  as long as the process
    if command not in _TOGETHER:
        raise ConfigError(
            f"it runs in one process; {', '.join(_TOGETHER)} run in several. Start it without mlx.launch."
        )
    if "--pipeline" in words:
        raise ConfigError(
            "--pipeline divides a model by its layers, and mlx_tq only by its heads, of which each rank has some in "
            "all layers. Drop it."
        )
    exit_on_sigterm(_line(command, "told to end (SIGTERM), which mlx.launch does where another rank has ended."))


def _line(command: str, message: str) -> str:
    who = f"rank {launched_rank()}: " if is_launched() else ""
    return f"mlx_tq {command}: {who}{readable(message)}"


def _tell(command: str, message: str) -> None:
    """Why the process ends: the only line about it where others run with it."""
    line = _line(command, message)
    if is_launched():
        write_last_line(line)
    else:
        sys.stderr.write(f"{line}\n")


def _give_up_output() -> None:
    """Do not let the interpreter complain at exit of what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
