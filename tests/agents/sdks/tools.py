"""What the scripts have in common: three tools, and the conversation in a file."""

import argparse
import subprocess
from pathlib import Path

MODEL = "default_model"
HISTORY = Path("history")


def parse_words():
    """Return the prompt, and whether it continues the conversation."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("prompt")
    args = parser.parse_args()
    return args.prompt, args.resume


def read_file(path: str) -> str:
    """Return the text of a file.

    Args:
        path: of the file
    """
    return Path(path).read_text()


def replace_text(path: str, old: str, new: str) -> str:
    """Replace a text in a file.

    Args:
        path: of the file
        old: the text as it is
        new: the text that takes its place
    """
    Path(path).write_text(Path(path).read_text().replace(old, new))
    return "replaced"


def run_command(command: str) -> str:
    """Run a shell command and return what it prints.

    Args:
        command: as a shell reads it
    """
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout


TOOLS = {tool.__name__: tool for tool in (read_file, replace_text, run_command)}


def schema_of(tool):
    """Return the JSON schema of a tool's arguments, which are all strings."""
    names = [name for name in tool.__annotations__ if name != "return"]
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
