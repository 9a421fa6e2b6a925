"""The parsers of the commands: help with defaults, and the flags that several commands have."""

import argparse
from typing import Any

from mlx_tq import __version__
from mlx_tq.cli.options import (
    AUTO,
    BACKEND,
    CACHE,
    DTYPES,
    MAIN_FLAGS,
    PREFIX_CACHE,
    PROMPT_LOOKUP,
    RECALL,
    RESCUE,
    SAMPLING,
    SHADOW,
    Option,
    parse_auto_switch,
    parse_size,
)

_DEFAULT_MARK = "(default: "  # begins a default that a help text states itself


class _MinorFlag(argparse._StoreAction):
    """A flag that --help leaves out."""


class _Formatter(argparse.HelpFormatter):
    def add_argument(self, action: argparse.Action) -> None:
        if not isinstance(action, _MinorFlag):
            super().add_argument(action)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        """Add the default that a help text does not state; switches and required flags show none."""
        text, default = action.help, action.default
        if not text or _DEFAULT_MARK in text or action.required or action.nargs == 0:
            return text
        if default in (None, argparse.SUPPRESS):
            return text
        shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
        return f"{text} {_DEFAULT_MARK}{shown.replace('%', '%%')})"


class CommandParser(argparse.ArgumentParser):
    """A parser that notes in `typed` the flags that differ from their defaults."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Formatter, **options})

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
                add_option(group, option)
        full.print_help()
        parser.exit()


def command_parser(command: str, description: str, usage: str | None = "[options]") -> CommandParser:
    """Return a parser of `mlx_tq.COMMAND`; `usage` is what follows that name, None for a list of its flags."""
    parser = CommandParser(prog=f"mlx_tq.{command}", description=description, usage=usage and f"%(prog)s {usage}")
    parser.add_argument("--version", action="version", version=__version__, help="show the version and exit")
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
    groups = {"KV cache": ("each flag falls back to MLX_TQ_ and its name, such as MLX_TQ_KV_KEY", options)}
    if rescue:
        groups["rescue"] = ("a service's token comes from RESCUE_TOKEN", list(RESCUE))
    help_kv = "show all flags of the KV cache and exit"
    parser.add_argument("--help-kv", action=_KVHelp, nargs=0, const=groups, help=help_kv)
    for title, (text, members) in groups.items():
        group = parser.add_argument_group(title, text)
        for option in members:
            add_option(group, option, "store" if option.flag in MAIN_FLAGS else _MinorFlag)


def add_option(group: argparse._ActionsContainer, option: Option, action: Any = "store") -> None:
    group.add_argument(option.flag, type=option.parse, metavar=option.metavar, help=option.help, action=action)


def add_model_arguments(
    parser: argparse._ActionsContainer, *, adapter: bool = True, several: bool = False, dtype: str | None = None
) -> None:
    """Add the flags that choose a model, or `several`; `adapter` says whether the command takes LoRA adapters.

    `dtype` is the default compute type.
    """
    add = parser.add_argument
    names = "folder, hub name, .gguf file or smollm2"
    if several:
        names += ", or a folder of models; may be repeated, and the first model is the default"
    add("--model", action="append" if several else "store", help=f"{names} (default: needle, the bundled model)")
    if adapter:
        add("--adapter-path", metavar="DIR", help="folder of LoRA adapters from mlx_lm.lora (default: none)")
    add("--trust-remote-code", action="store_true", help="allow the model and its tokenizer to run their own code")
    types = "compute type (default: that of the model's weights)"
    types = types if dtype is None else f"compute type; half precision adds rounding to divergences (default: {dtype})"
    add("--dtype", choices=DTYPES, default=dtype, help=types)
    add_dequantize_argument(parser)


def add_dequantize_argument(parser: argparse._ActionsContainer) -> None:
    text = "make packed weights dense on load, which is faster on a CPU and takes more memory; auto does so on a CPU, "
    text += "in float32, if half of the memory is enough for them, but not with --kv-profile off (default: auto)"
    parser.add_argument("--dequantize", type=parse_auto_switch, metavar="{auto,on,off}", help=text)


def add_memory_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the flags that choose a profile by the memory that it takes."""
    memory = "choose the best --kv-profile with which weights and one context fit into this, such as 12GB"
    parser.add_argument("--memory", type=parse_size, metavar="SIZE", help=f"{memory} (default: none)")
    context = "tokens of that context (default: the model's context length)"
    parser.add_argument("--context", type=int, metavar="N", help=context)


def add_lookup_argument(parser: argparse._ActionsContainer) -> None:
    text = "speculative decoding with drafts copied from the conversation: auto drafts where that is possible and "
    text += "expected to be faster, on wherever text repeats; not possible with --kv-evict, or with caches that cannot "
    text += "be rolled back"
    parser.add_argument("--prompt-lookup", choices=PROMPT_LOOKUP, default=AUTO, help=text)


def add_sampling_arguments(
    group: argparse._ActionsContainer, options: tuple[Option, ...] = SAMPLING, *, from_model: bool = False
) -> None:
    """Add flags of sampling; `from_model` says whether the model's generation_config.json has their defaults."""
    for option in options:
        shared: dict[str, Any] = {"type": option.parse, "metavar": option.metavar}
        if from_model and option.config_name is not None:
            default = f"{_DEFAULT_MARK}that of generation_config.json, else {option.default:g})"
            group.add_argument(option.flag, help=f"{option.help} {default}", **shared)
        else:
            group.add_argument(option.flag, default=option.default, help=option.help, **shared)
