"""The commands that GitHub's Mac runs exist: nobody sees it fail here, where there is no Metal."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import build_parser

WORKFLOW = Path(__file__).parents[2] / ".github/workflows/macos.yml"
COMMANDS = re.findall(r"-m mlx_tq (.*)", WORKFLOW.read_text())
MEASUREMENTS = re.findall(r"-m benchmarks\.gpu (.*)", WORKFLOW.read_text())


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_of_the_workflow_is_one(words):
    command, *options = shlex.split(words)
    args = importlib.import_module(f"mlx_tq.{command}").build_parser().parse_args(options)
    assert args.backend == "metal"


def test_the_workflow_measures_the_gpu_and_keeps_the_results():
    (words,) = MEASUREMENTS
    args = build_parser().parse_args(shlex.split(words))
    assert not args.dry
    assert f"path: {args.json}\n" in WORKFLOW.read_text()
    minutes = int(re.search(r"timeout-minutes: (\d+)", WORKFLOW.read_text()).group(1))
    assert args.seconds < 60 * minutes / 2


def test_the_workflow_runs_two_commands_and_the_tests_of_folders_that_exist():
    (named,) = re.findall(r"-m pytest .*? (tests/.*)", WORKFLOW.read_text())
    assert all((WORKFLOW.parents[2] / path).is_dir() for path in named.split())
    assert len(COMMANDS) == 2
