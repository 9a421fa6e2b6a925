"""Write flags.md, beside this file, from the parsers of all commands: `python docs/reference/flags.py`."""

import argparse
import re
from dataclasses import fields
from importlib import import_module
from inspect import cleandoc
from pathlib import Path

from mlx_tq.__main__ import COMMANDS
from mlx_tq.policies import parse_policy, policy_names

HEAD = """# Flags

Written by `python docs/reference/flags.py` from the commands' own parsers; a test fails where it is not current.
Each command runs as `mlx_tq.COMMAND`, as `mlx_tq COMMAND` and as `python -m mlx_tq.COMMAND`.
"""
# Groups of flags that several commands have, told once: heading and anchor.
SHARED = {"KV cache": ("The KV cache", "the-kv-cache"), "rescue": ("Rescue", "rescue")}
ATTRIBUTE = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)  # of a docstring's list
# argparse has no public way to groups, actions and metavars, hence the names with an underscore.


def reference() -> str:
    """The whole page."""
    parsers = {name: import_module(f"mlx_tq.{name}").build_parser() for name in COMMANDS}
    parts = [HEAD]
    for name, parser in parsers.items():
        parts += [f"## mlx_tq.{name}", sentence(COMMANDS[name])]
        nested = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        for word, leaf in (nested[0] if nested else {}).items():
            parts += [f"### mlx_tq.{name} {word}", sentence(str(leaf.description)), *flags_of(leaf, parsers["chat"])]
        parts += [] if nested else flags_of(parser, parsers["chat"])
    for title, (heading, _) in SHARED.items():
        group = next(group for group in parsers["chat"]._action_groups if group.title == title)  # chat has them all
        parts += [f"## {heading}", sentence(str(group.description)), table(parsers["chat"], group._group_actions)]
    parts += ["## Options of policies", "Behind the name of a policy, as in `--kv-evict triattention:trigger=32`."]
    parts += [policy_options()]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def flags_of(parser: argparse.ArgumentParser, full: argparse.ArgumentParser) -> list[str]:
    """The table of a command's own flags, and where the shared ones are told, which are those of `full`."""
    shared = [group for group in parser._action_groups if group.title in SHARED]
    elsewhere = {action.dest for group in shared for action in group._group_actions} | {"help"}
    links = " and ".join(_link(group, full) for group in shared)
    own = [action for action in parser._actions if action.dest not in elsewhere]
    return [table(parser, own), *([f"Further flags: {links}."] if shared else [])]


def _link(group: argparse._ArgumentGroup, full: argparse.ArgumentParser) -> str:
    """To where a shared group is told, and what of it this one lacks."""
    told = next(each for each in full._action_groups if each.title == group.title)
    flags = [{flag for action in each._group_actions for flag in action.option_strings} for each in (told, group)]
    missing = ", ".join(f"`{flag}`" for flag in sorted(flags[0] - flags[1]))
    link = "[{}](#{})".format(*SHARED[str(group.title)])
    return f"{link} without {missing}" if missing else link


def table(parser: argparse.ArgumentParser, actions: list[argparse.Action]) -> str:
    """A row for each flag, its default taken out of the text in which `--help` tells it."""
    rows = ["| flag | default | what it does |", "|---|---|---|"]
    for action in actions:
        told = parser._get_formatter()._expand_help(action)
        what, mark, default = re.fullmatch(r"(.*?)(?: (\(default: )(.*)\))?", told).group(1, 2, 3)
        cells = (spelling(parser, action), default if mark else "required" if action.required else "off", what)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def policy_options() -> str:
    """A row for each option, as the docstrings of the policies that have it tell it."""
    rows = ["| option | default | of | what it does |", "|---|---|---|---|"]
    every = [type(parse_policy(name)) for name in policy_names()]
    policies = [policy for policy in every if policy.__module__.startswith("mlx_tq.")]  # plug-ins tell their own
    kinds = dict.fromkeys(kind for policy in policies for kind in policy.__mro__)
    told = dict(pair for kind in kinds for pair in ATTRIBUTE.findall(cleandoc(str(kind.__doc__))))
    for name in dict.fromkeys(each.name for policy in policies for each in fields(policy)):
        own = [policy for policy in policies if hasattr(policy, name)]
        of = "all" if own == policies else ", ".join(f"`{policy.name}`" for policy in own)
        default = getattr(own[0], name)
        default = "off" if default is False else default
        rows.append(f"| `{name}` | {default} | {of} | {' '.join(told[name].split())} |")
    return "\n".join(rows)


def spelling(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """A flag with what it takes, and its short form."""
    formatter = parser._get_formatter()
    takes = formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
    short, long = sorted(action.option_strings, key=len)[:-1], max(action.option_strings, key=len)
    return ", ".join(f"`{flag}`" for flag in (f"{long} {takes}".strip(), *short))


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    return f"{text[0].upper()}{text[1:].rstrip('.')}."


if __name__ == "__main__":
    Path(__file__).with_name("flags.md").write_text(reference(), encoding="utf-8")
