"""Commands of mlx_tq and of mlx-lm inside the test's process."""

import io
import signal
import subprocess
import sys
from importlib import import_module

import pytest

from mlx_tq.__main__ import main

from .tools import FLOAT32, Result, command, environment


@pytest.fixture
def cli(capsys, monkeypatch):
    """Run `mlx_tq WORDS`; standard input is the text or the stream `stdin`, empty otherwise."""

    def call(*words, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin) if isinstance(stdin, str) else stdin)
        try:
            code = main([str(word) for word in words])
        except SystemExit as exit_:  # argparse
            code = exit_.code
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture
def quick(cli):
    """`cli`, in float32 unless --dtype says otherwise."""

    def call(*words, **options):
        computes = words[0] in ("generate", "cache_prompt") and "--dtype" not in words
        return cli(*words, *(FLOAT32 if computes else ()), **options)

    return call


@pytest.fixture
def start(popen):
    """Start `mlx_tq WORDS`; Ctrl-C reaches it even where this process ignores it, as background jobs do."""

    def call(*words, **options):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **options}
        return popen(
            command(*words),
            env=environment(),
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            **pipes,
        )

    return call


@pytest.fixture
def mlx_lm(capsys, monkeypatch):
    """Run `mlx_lm.COMMAND WORDS` and return what it printed."""

    def call(command, *words, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.setattr(sys, "argv", [f"mlx_lm.{command}", *map(str, words)])
        import_module(f"mlx_lm.{command}").main()
        return capsys.readouterr().out

    return call
