"""Run a command: parse its flags, turn errors into a line and an exit code, and take part in `mlx.launch`."""

import argparse
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import current_thread, main_thread

from http_limits.process_checks import (
    home_error,
    open_files_error,
    open_standard_streams,
    temporary_folder_error,
)
from mlx_tq.cli.fast_blas import use_fast_blas
from mlx_tq.cli.fast_import import import_transformers
from mlx_tq.cli.options import check_environment, choose_backend
from mlx_tq.cli.terminal_text import readable
from mlx_tq.distributed.launch import exit_now, exit_on_sigterm, is_launched, launched_rank, write_last_line
from mlx_tq.errors import (
    ConfigError,
    MlxTqError,
    RankError,
    RescueError,
    UncalibratedWarning,
    backend_error,
    is_out_of_memory,
    one_line,
)

Run = Callable[[argparse.Namespace], int]
DONE, FAILED, USAGE_ERROR, INTERRUPTED = 0, 1, 2, 130
_DISTRIBUTED = ("generate", "chat", "server")  # commands that several processes run together
REPEAT_S = 5.0  # longer than it takes to delete the text of a conversation
_END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_MLX_BACKENDS = ("[ring]", "[jaccl]", "[mpi]", "[nccl]")  # begin mlx's errors about other processes


def command_main(build_parser: Callable[[], argparse.ArgumentParser], run: Run) -> Callable[..., int]:
    """Return the `main` of a command: it takes a command line, by default that of this process."""
    return lambda words=None: run_command(build_parser(), run, words)


def run_command(parser: argparse.ArgumentParser, run: Run, words: Sequence[str] | None = None) -> int:
    """Parse the command line `words`, by default that of this process, and call `run`; return the exit code."""
    command = parser.prog.partition(".")[2]

    def parse_and_run() -> int:
        if is_launched():
            if launched_rank():
                sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  as long as the process
            if command not in _DISTRIBUTED:
                several = "only generate, chat and server can run under mlx.launch"
                raise ConfigError(f"{command} runs in one process; {several}. Start it without mlx.launch.")
            if "--pipeline" in (sys.argv[1:] if words is None else words):
                reason = "mlx_tq divides a model by its heads, not its layers"
                raise ConfigError(f"--pipeline is not supported: {reason}. Drop it.")
            exit_on_sigterm(_line(command, "terminated (SIGTERM); mlx.launch does this when another rank has ended."))
        args = parser.parse_args(words)
        check_environment()
        _check_process(command)
        use_fast_blas()
        if words is None:
            import_transformers()
        choose_backend(args)
        format_warning, warnings.formatwarning = warnings.formatwarning, lambda text, *_, **__: f"warning: {text}\n"
        try:
            with nullcontext() if is_launched() else _exit_on_signals(), warnings.catch_warnings():
                warnings.simplefilter("ignore", UncalibratedWarning)  # commands calibrate, or say why not
                return run(args)
        except RescueError as error:
            raise RescueError(f"{error} Or choose --rescue off.") from error
        finally:
            warnings.formatwarning = format_warning

    return run_reporting_errors(command, parse_and_run)


def run_reporting_errors(command: str, run: Callable[[], int]) -> int:
    """Call `run` and return the exit code; an error of ours becomes one line on stderr."""
    open_standard_streams()
    try:
        try:
            return run()
        except ImportError as error:
            if (fault := backend_error(error)) is None:
                raise
            raise fault from error
        finally:
            sys.stdout.flush()
    except MlxTqError as error:
        if not (isinstance(error, RankError) and error.on_all_ranks and launched_rank()):
            _report(command, str(error))
        return USAGE_ERROR if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except (RuntimeError, MemoryError) as error:
        if not _is_rank_failure(error) and not is_out_of_memory(error):
            raise
        _report(command, _describe_failure(error))
        return FAILED
    except BrokenPipeError:  # the reader of our output has closed it
        _discard_output()
        return FAILED
    except OSError as error:  # such as a full disk behind our output
        _discard_output()
        _report(command, str(error))
        return FAILED


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Exit with 128 + N on SIGTERM and SIGHUP, so that the text of a conversation is deleted where it was sent.

    A signal that is ignored stays so, and a handler that C installed remains. For `REPEAT_S` after the first signal,
    others are ignored: a shell and its terminal both send SIGHUP. Later ones count, because a finalizer may have
    swallowed the exit.
    """
    if current_thread() is not main_thread():  # which alone may set handlers
        yield
        return
    handlers = {number: signal.getsignal(number) for number in _END_SIGNALS}
    numbers = [number for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)]
    ignored_until = 0.0

    def end(number: int, _: object) -> None:
        nonlocal ignored_until
        if time.monotonic() >= ignored_until:
            ignored_until = time.monotonic() + REPEAT_S
            raise SystemExit(128 + number)

    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, handlers[number])


def _check_process(command: str) -> None:
    """Raise ConfigError if the process lacks what the command needs."""
    fault = home_error()
    if command != "store":  # which computes nothing, and can make room on a full disk
        fault = fault or temporary_folder_error() or open_files_error()
    if fault is not None:
        raise ConfigError(fault)


def end_rank(command: str, error: Exception) -> None:
    """End this process now, from any thread, with a line that says why; other ranks would wait for it forever."""
    exit_now(_line(command, _describe_failure(error)))


def _is_rank_failure(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and str(error).startswith(_MLX_BACKENDS)


def _describe_failure(error: Exception) -> str:
    if _is_rank_failure(error):
        return f"another rank has ended or cannot be reached ({error})."
    if is_out_of_memory(error):
        return f"the machine has too little memory ({one_line(error)}). Use a smaller model, or a shorter context."
    return str(error) if isinstance(error, MlxTqError) else repr(error)


def _line(command: str, message: str) -> str:
    rank = f"rank {launched_rank()}: " if is_launched() else ""
    return f"mlx_tq {command}: {rank}{readable(message)}"


def _report(command: str, message: str) -> None:
    line = _line(command, message)
    if is_launched():
        write_last_line(line)
    else:
        sys.stderr.write(f"{line}\n")


def _discard_output() -> None:
    # Else the interpreter complains at exit that it could not write the rest.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
