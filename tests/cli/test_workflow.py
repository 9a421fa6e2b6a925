"""The commands that GitHub's Mac runs exist: nobody sees it fail here, where there is no Metal."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

WORKFLOW = Path(__file__).parents[2] / ".github/workflows/macos.yml"
COMMANDS = re.findall(r"-m mlx_tq (.*)", WORKFLOW.read_text())


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_of_the_workflow_is_one(words):
    command, *options = shlex.split(words)
    args = importlib.import_module(f"mlx_tq.{command}").build_parser().parse_args(options)
    assert args.backend == "metal"


def test_the_workflow_runs_three_commands_and_the_tests_of_folders_that_exist():
    (named,) = re.findall(r"-m pytest .*? (tests/.*)", WORKFLOW.read_text())
    assert all((WORKFLOW.parents[2] / path).is_dir() for path in named.split())
    assert len(COMMANDS) == 3
