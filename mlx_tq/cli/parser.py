"""The parser that every command begins with: its help shows each flag's default."""

import argparse
from typing import Any

MARK = "(default: "  # begins a default that a help text tells itself, where the parser's own says nothing


class _Help(argparse.HelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = own_default(action)
        return action.help if default is None else f"{action.help} {MARK}{default.replace('%', '%%')})"


class _Parser(argparse.ArgumentParser):
    """Subcommands are of their parser's class, and so show defaults too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **options})


def command_parser(command: str, description: str, usage: str | None = None) -> argparse.ArgumentParser:
    """An empty parser of `mlx_tq.COMMAND`; `usage` is what follows that name, in place of a list of all flags."""
    return _Parser(prog=f"mlx_tq.{command}", description=description, usage=usage and f"%(prog)s {usage}")


def own_default(action: argparse.Action) -> str | None:
    """The default to add to a flag's help, or None where there is nothing to add.

    A switch is off, a required flag has none, and a help text that tells its default knows better: of a flag that
    falls back to the environment, say, the parser has only None.
    """
    told = action.help is None or MARK in action.help
    if told or action.required or action.nargs == 0 or action.default in (None, argparse.SUPPRESS):
        return None
    many = isinstance(action.default, list | tuple)
    return " ".join(map(str, action.default)) if many else str(action.default)
