"""The parsers of the commands: help with defaults, and the flags that several commands have."""

import argparse
from typing import Any

from mlx_tq.cli.options import BACKEND, CACHE, DTYPES, MAIN_FLAGS, PREFIX_CACHE, RECALL, RESCUE, SHADOW, Option

_DEFAULT_MARK = "(default: "  # begins a default that a help text states itself

_KV_HELP = "each flag falls back to MLX_TQ_ and its name, such as MLX_TQ_KV_KEY"
_RESCUE_HELP = "a service's token comes from RESCUE_TOKEN"


class _Formatter(argparse.HelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = _unstated_default(action)
        return action.help if default is None else f"{action.help} {_DEFAULT_MARK}{default.replace('%', '%%')})"


def _unstated_default(action: argparse.Action) -> str | None:
    """Return the default to add to a help text; switches and required flags have no default to show."""
    has_text = action.help is not None and _DEFAULT_MARK not in action.help
    if not has_text or action.required or action.nargs == 0 or action.default in (None, argparse.SUPPRESS):
        return None
    return " ".join(map(str, action.default)) if isinstance(action.default, list | tuple) else str(action.default)


class CommandParser(argparse.ArgumentParser):
    """A parser whose --help leaves out minor flags, and which notes in `typed` the flags that differ from defaults."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Formatter, **options})
        self.minor: list[argparse.Action] = []

    def format_help(self) -> str:
        texts = [action.help for action in self.minor]
        try:
            for action in self.minor:
                action.help = argparse.SUPPRESS
            return super().format_help()
        finally:
            for action, text in zip(self.minor, texts, strict=True):
                action.help = text

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        namespace, rest = super().parse_known_args(args, namespace)
        namespace.typed = getattr(namespace, "typed", {}) | {
            max(action.option_strings, key=len): getattr(namespace, action.dest)
            for action in self._actions
            if action.option_strings and getattr(namespace, action.dest, action.default) != action.default
        }
        return namespace, rest


class _KVHelp(argparse.Action):
    """Show all flags of the KV cache, which `const` has by group."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        full = CommandParser(prog=parser.prog, usage="%(prog)s [options]", add_help=False)
        for title, (text, options) in self.const.items():
            group = full.add_argument_group(title, text)
            for option in options:
                _add_option(group, option)
        full.print_help()
        parser.exit()


def command_parser(command: str, description: str, usage: str | None = "[options]") -> CommandParser:
    """Return a parser of `mlx_tq.COMMAND`; `usage` is what follows that name, None for a list of its flags."""
    parser = CommandParser(prog=f"mlx_tq.{command}", description=description, usage=usage and f"%(prog)s {usage}")
    parser.set_defaults(command=command)
    return parser


def add_cache_arguments(
    parser: CommandParser,
    *,
    recall: bool = False,
    prefix_cache: bool = False,
    shadow: bool = False,
    rescue: bool = False,
) -> None:
    """Add the flags of the KV cache: the main ones to --help, and all to --help-kv."""
    options = [*CACHE, *(RECALL if recall else ()), *(PREFIX_CACHE if prefix_cache else ())]
    options += [*(SHADOW if shadow else ()), BACKEND]
    groups = {"KV cache": (_KV_HELP, options)}
    if rescue:
        groups["rescue"] = (_RESCUE_HELP, list(RESCUE))
    parser.add_argument(
        "--help-kv", action=_KVHelp, nargs=0, const=groups, help="show all flags of the KV cache and exit"
    )
    for title, (text, members) in groups.items():
        group = parser.add_argument_group(title, text)
        for option in members:
            action = _add_option(group, option)
            if option.flag not in MAIN_FLAGS:
                parser.minor.append(action)


def _add_option(group: argparse._ActionsContainer, option: Option) -> argparse.Action:
    return group.add_argument(option.flag, type=option.parse, metavar=option.metavar, help=option.help)


def add_backend_argument(parser: argparse._ActionsContainer) -> None:
    _add_option(parser, BACKEND)


def add_model_arguments(parser: argparse._ActionsContainer, *, adapter: bool = True) -> None:
    """Add the flags that choose a model; `adapter` says whether the command takes LoRA adapters."""
    add = parser.add_argument
    add("--model", help="folder, hub name, .gguf file or smollm2 (default: the embedded model)")
    if adapter:
        add("--adapter-path", metavar="DIR", help="folder of LoRA adapters from mlx_lm.lora (default: none)")
    add("--trust-remote-code", action="store_true", help="allow the tokenizer to run its own code")
    add("--dtype", choices=DTYPES, help="compute type (default: that of the model's weights)")
    add("--dequantize", action="store_true", help="dequantize the weights on load; faster on a CPU")


def add_sampling_arguments(group: argparse._ActionsContainer) -> None:
    add = group.add_argument
    add("--temp", type=float, default=0.0, metavar="T", help="sampling temperature; 0 is greedy")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens of this total probability",
    )
    add("--top-k", type=int, default=0, metavar="N", help="sample from the N most likely tokens; 0 is all")
    add("--min-p", type=float, default=0.0, metavar="P", help="minimum probability relative to the most likely token")
