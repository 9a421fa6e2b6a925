"""Checks of what many random files lead to, file by file; a failure names the seed of its file."""

import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cli.tools import command, environment


def check_errors(seeds: Iterable[int], attempt: Callable[[int], str | None], pattern: str) -> None:
    """Check that `attempt` returns None for some seeds, and for most the error of mlx_tq, which matches `pattern`."""
    errors = []
    for seed in seeds:
        try:
            errors.append(attempt(seed))
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
        assert errors[-1] is None or re.fullmatch(pattern, errors[-1]), f"seed {seed}: {errors[-1]}"
    assert 0 < errors.count(None) < len(errors) / 2


def exit_codes(seeds: Iterable[int], write: Callable[[int], Any], *words: str | Path | int) -> set[int]:
    """Return the exit codes of a command after `write` has written its file; an error has to be one line."""
    codes = set()
    for seed in seeds:
        write(seed)
        result = subprocess.run(command(*words), env=environment(), capture_output=True, text=True)
        codes.add(result.returncode)
        lines = result.stderr.splitlines()
        assert result.returncode == 0 or (result.returncode in (1, 2) and len(lines) == 1), f"seed {seed}: {lines}"
    return codes
