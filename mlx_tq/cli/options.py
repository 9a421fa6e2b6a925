"""The options of the KV cache, and the `Request` that flags and environment make of them.

`--help` loads this module, so it imports what loads mlx only where a value is used.
"""

import argparse
import difflib
import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_tq.errors import ConfigError
from mlx_tq.files import is_replaceable
from mlx_tq.speculative.draft_gate import MAX_ROWS

if TYPE_CHECKING:
    from mlx_tq.config import EvictConfig, KVConfig, RescueConfig

# Names for help texts. The registries that have them load mlx; a test compares the two.
PROFILES = ("off", "safe", "balanced", "small", "tiny", "long")
DEFAULT_PROFILE = "balanced"
POLICIES = ("triattention", "expected_attention", "knorm", "random", "recency", "streaming", "heads")
BACKENDS = ("auto", "metal", "cuda", "cpu", "reference")
DTYPES = ("float32", "float16", "bfloat16")
ON_FULL = ("stop", "drop-oldest")
PROMPT_LOOKUP = ("auto", "on", "off")

STATE_FORMATS = ("exact", "q8")

OFF, AUTO, NONE = "off", "auto", "none"
STDOUT = "-"  # in place of a file
API_KEY_VARIABLE = "MLX_TQ_API_KEY"
# Lower temperatures choose the likeliest token: dividing by them would overflow in float16, and all tokens be alike.
LOWEST_TEMPERATURE = 1e-3
LOWEST_PENALTY = 0.01  # logits are divided by it, and must stay finite in float16
_PREFIX = "MLX_TQ_"
_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9}
_QUOTABLE_BLOCK = 64  # tokens evicted together, so that their text can be found again


def parse_switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"{text!r} is not on or off")
    return text == "on"


def parse_auto_switch(text: str) -> bool | None:
    if text not in (AUTO, "on", "off"):
        raise argparse.ArgumentTypeError(f"{text!r} is not auto, on or off")
    return None if text == AUTO else text == "on"


def parse_json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def parse_size(text: str) -> int:
    number, unit = text[:-2], text[-2:].upper()
    try:
        size = int(float(number) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write it like 800MB or 4GB, above zero")
    return size


def parse_temperature(text: str) -> float:
    try:
        temperature = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a temperature; write a number such as 0.7") from error
    return 0.0 if 0 < temperature < LOWEST_TEMPERATURE else temperature


def parse_penalty(text: str) -> float:
    penalty = float(text)
    if 0 < penalty < LOWEST_PENALTY:
        raise argparse.ArgumentTypeError(f"{text!r} is too small; write 0 or 1 (off), or {LOWEST_PENALTY:g} to 10")
    return penalty


def parse_state_format(text: str) -> str:
    if text not in STATE_FORMATS:
        raise argparse.ArgumentTypeError(f"{text!r} is not {' or '.join(STATE_FORMATS)}")
    return text


def given_models(args: argparse.Namespace) -> list[str | None]:
    """Return the models of --model, of which a server may have several; None is the default."""
    return args.model if isinstance(args.model, list) else [args.model]


class Option(NamedTuple):
    """A flag. Without a `default`, that is the environment variable of its name: MLX_TQ_KV_KEY for --kv-key.

    `config_name` is the name of a sampling flag in a model's generation_config.json, if it has one there.
    """

    flag: str
    metavar: str
    parse: Callable[[str], Any]
    help: str
    default: float | None = None
    config_name: str | None = None

    @property
    def variable(self) -> str:
        return _PREFIX + name_of(self.flag).upper()


_TOP_P = "sample from the most likely tokens of this total probability"
_MIN_P = "minimum probability relative to the most likely token"
_PENALTY = "penalty on the tokens that occurred recently in this prompt and answer, such as 1.1; 1 is off"
_PRESENCE = "penalty on each token that occurs among the last 20, such as 1.5; 0 is off"
_FREQUENCY = "penalty for each time that a token occurs among the last 20, such as 0.5; 0 is off"
SAMPLING = (
    Option("--temp", "T", parse_temperature, "sampling temperature; 0 is greedy", 0.0, "temperature"),
    Option("--top-p", "P", float, _TOP_P, 1.0, "top_p"),
    Option("--top-k", "N", int, "sample from the N most likely tokens; 0 is all", 0, "top_k"),
    Option("--min-p", "P", float, _MIN_P, 0.0, "min_p"),
)
PENALTIES = (
    Option("--repetition-penalty", "X", parse_penalty, _PENALTY, 1.0, "repetition_penalty"),
    Option("--repetition-context-size", "N", int, "recent tokens that --repetition-penalty applies to", 20),
    Option("--presence-penalty", "X", float, _PRESENCE, 0.0, "presence_penalty"),
    Option("--frequency-penalty", "X", float, _FREQUENCY, 0.0, "frequency_penalty"),
)

_KEY = "key format: q8, tq4, tq3, ... (see docs/reference/formats.md), or one per layer joined by +"
_MEAN_BITS = "target average bits per value, e.g. 4.2; picks a format for each layer"
_RECENT = "recent tokens to store in the first (better) of two key formats, as in --kv-key tq4~tq3"
_OUTLIER = "keep the keys of a layer at 8 bits if their norm exceeds the median by this factor; 0 disables"
_NORMALIZE = "center and rescale keys before quantizing, which improves quality"
_EVICT = (
    f"eviction policy: {NONE}, {', '.join(POLICIES)}; with options as in triattention:trigger=64:warmup=512. Evicted "
    "tokens keep their positions: a conversation still ends at the model's context length"
)
_BUDGET = (
    "what eviction keeps: a number of tokens (4096), a share of the tokens seen (50%%), or bytes (2GB); with heads, a "
    "share of all rows at the model's context length (40%%) or another one (40%%@4096). Saves memory, and does not "
    "extend the model's context"
)
_CALIBRATION = "calibration for eviction: auto (once per model), text (this prompt), or a file from mlx_tq.calibrate"
_RECALL = (
    "maximum number of archived tokens to reload per question; auto is a tenth of the budget and at least 128, or off "
    "with --draft-model, --image or --kv-shadow"
)
_RECALL_EVERY = "while decoding, search the archive every N tokens (less often for large archives)"
_ARCHIVE = "save evicted tokens to an unlinked temporary file so that they can be recalled; off disables recall"
_PREFIX_CACHE = (
    "folder in which the KV cache of prompts is kept and reused by prompts that share a prefix; auto is the user's "
    "cache folder"
)
_STATE_FORMAT = (
    "format of the recurrent states of stored prompts: exact, or q8 for 8 bits in about a quarter of the bytes; for "
    "models with linear-attention or state-space layers"
)
_STATE_STEP = "store the recurrent states of a prompt every N tokens, and at the end of each turn"
_SHADOW = (
    "answer with the uncompressed cache, run the compressed cache alongside, and report every N tokens what it would "
    "have changed, e.g. 16"
)
_RESCUE = (
    "service that stores evicted text and finds it again: off, auto (your running service, else a private one), or a "
    "URL"
)
_LIMIT = "a tenth of the free disk, at most 20GB"

CACHE = (
    Option("--kv-profile", "PROFILE", str, f"KV cache profile: {', '.join(PROFILES)} (default: {DEFAULT_PROFILE})"),
    Option("--kv-key", "FORMAT", str, f"{_KEY} (default: the profile's)"),
    Option("--kv-value", "FORMAT", str, "value format, or one per layer joined by + (default: the profile's)"),
    Option("--kv-sinks", "N", int, "first tokens to keep in full precision (default: 128)"),
    Option("--kv-window", "N", int, "last tokens to keep in full precision (default: 128)"),
    Option("--kv-mean-bits", "BITS", float, f"{_MEAN_BITS} (default: none)"),
    Option("--kv-recent", "N", int, f"{_RECENT} (default: 512)"),
    Option("--kv-boundary", "N", int, "layers at each end of the model to keep at 8 bits or more (default: 0)"),
    Option("--kv-outlier", "RATIO", float, f"{_OUTLIER} (default: 3)"),
    Option("--kv-normalize", "{on,off}", parse_switch, f"{_NORMALIZE} (default: on)"),
    Option("--kv-evict", "POLICY", str, f"{_EVICT} (default: {NONE})"),
    Option("--kv-budget", "BUDGET", str, f"{_BUDGET} (default: 50%%)"),
    Option(
        "--kv-calibration",
        "SOURCE",
        str,
        f"{_CALIBRATION} (default: auto; on a CPU text, unless the model is calibrated)",
    ),
)
RECALL = (
    Option("--kv-recall", "N|auto|off", str, f"{_RECALL} (default: auto)"),
    Option("--kv-recall-every", "N", int, f"{_RECALL_EVERY} (default: 64)"),
    Option("--kv-archive", "{on,off}", parse_switch, f"{_ARCHIVE} (default: on)"),
    Option("--kv-archive-limit", "SIZE", parse_size, f"maximum size of a conversation's archive (default: {_LIMIT})"),
)
PREFIX_CACHE = (
    Option("--prefix-cache", "DIR|auto|off", str, f"{_PREFIX_CACHE} (default: off)"),
    Option("--prefix-cache-limit", "SIZE", parse_size, "maximum size of the prefix cache (default: 50GB)"),
    Option("--state-format", "exact|q8", parse_state_format, f"{_STATE_FORMAT} (default: exact)"),
    Option("--state-step", "N", int, f"{_STATE_STEP} (default: 2048)"),
)
SHADOW = (Option("--kv-shadow", "N", int, f"{_SHADOW} (default: off)"),)
BACKEND = Option("--backend", "BACKEND", str, f"compute backend: {', '.join(BACKENDS)} (default: auto)")
RESCUE = (
    Option("--rescue", "off|auto|URL", str, f"{_RESCUE} (default: off; in chat with eviction: auto)"),
    Option(
        "--rescue-tokens", "N", int, "maximum tokens to quote per turn (default: 1/8 of the context, at most 2,048)"
    ),
    Option("--rescue-timeout", "SECONDS", float, "maximum wait for the service per turn (default: 1)"),
)
OPTIONS = {option.flag: option for option in (*CACHE, *RECALL, *PREFIX_CACHE, *SHADOW, BACKEND, *RESCUE)}
CACHE_FLAGS = tuple(option.flag for option in CACHE)
# Shown by --help; --help-kv shows all.
MAIN_FLAGS = (*CACHE_FLAGS[:5], "--kv-evict", "--kv-budget", "--kv-recall", "--prefix-cache", "--rescue")

# Fields of KVConfig, EvictConfig and RescueConfig that flags set.
CONFIG_FIELDS = {flag: flag.removeprefix("--kv-").replace("-", "_") for flag in CACHE_FLAGS[1:10]}
RECALL_FIELDS = {"--kv-recall-every": "recall_every", "--kv-archive-limit": "archive_limit"}
RESCUE_FIELDS = {"--rescue": "service", "--rescue-tokens": "max_tokens", "--rescue-timeout": "timeout"}

# Flags that choose formats, which --kv-mean-bits does too; the last two do so for some layers.
NAMING_FORMATS = ("--kv-profile", "--kv-key", "--kv-value")
CHOOSING_FORMATS = (*NAMING_FORMATS, "--kv-boundary", "--kv-outlier")
_FP16_CACHE = "mlx-lm's own cache (fp16 formats, or MLX_TQ_KV_PROFILE=off)"
_NATIVE_CACHE = ("--kv-bits", "--max-kv-size", "--kv-profile off", _FP16_CACHE)  # what chooses mlx-lm's own cache

_MODEL_BENCH = (
    *("--kv-evict", "--kv-budget", "--kv-calibration", "--kv-bits", "--batches", "--max-tokens", "--markdown"),
    *("--dequantize", "--prefill-step-size"),
)
# What a flag has no effect without; "A or B" is either one. Some rules are for one command.
REQUIRES: dict[str, tuple[str, ...]] = {
    "--kv-budget": ("--kv-evict",),
    "--kv-calibration": ("--kv-evict",),
    "--kv-recall": ("--kv-evict",),
    "--kv-recall-every": ("--kv-evict", "--kv-archive on", "--kv-recall auto"),
    "--kv-archive": ("--kv-evict",),
    "--kv-archive-limit": ("--kv-evict", "--kv-archive on", "--kv-recall auto"),
    "--context": ("--memory",),
    "--prefix-cache-limit": ("--prefix-cache",),
    "--prefix-cache-share": ("--prefix-cache",),
    "generate --state-format": ("--prefix-cache",),
    **{f"{command} --state-step": ("--prefix-cache",) for command in ("generate", "chat")},
    "server --num-draft-tokens": ("--draft-model",),
    "--rescue-tokens": ("--rescue",),
    "--rescue-timeout": ("--rescue",),
    "generate --rescue": ("--kv-evict",),
    "connect --server-args": ("--run",),
    "connect --dry-run": ("--run or --write",),
    **{f"doctor {flag}": ("--capacity",) for flag in ("--model", "--memory", "--dtype", "--dequantize")},
    "doctor --trust-remote-code": ("--capacity",),
    **{f"bench {flag}": ("--model or --report",) for flag in _MODEL_BENCH},
}
EXCLUDES: dict[str, tuple[str, ...]] = {
    "--kv-mean-bits": (*CHOOSING_FORMATS, "--kv-profile off"),
    "--kv-memory-limit": _NATIVE_CACHE,
    "--memory": (
        *("--kv-memory-limit", "--kv-mean-bits", "--kv-shadow", "--draft-model", "--prompt-cache-file", "--load"),
        *_NATIVE_CACHE[:2],
    ),
    "--kv-recall": ("--kv-archive off",),
    "--kv-shadow": ("--draft-model", "--prompt-cache-file", *_NATIVE_CACHE),
    "--prefix-cache": ("--image", "--prompt-cache-file", "--kv-shadow", *_NATIVE_CACHE),
    "generate --prefix-cache": ("--draft-model",),
    "server --draft-model": ("--kv-evict",),
    "generate --rescue": ("--draft-model", "--image", "--prompt-cache-file", "--kv-shadow"),
    "--json-schema": ("--draft-model",),
    "--kv-bits": ("--draft-model",),
    "--prompt-lookup on": ("--draft-model", "--kv-evict", "--kv-shadow", "--image"),
    "--prompt": ("--prompt-file",),
    "--system-prompt": ("--load",),
    "--on-full": ("--kv-shadow",),
    "connect --write": ("--run",),
    "connect --server-args": ("--url",),
    "--compact": ("--kv-evict", "--kv-profile off"),
    "--decode": ("--compact", "--prompt", "--prompt-file", *CACHE_FLAGS, "--kv-profile off"),
    "--profiles": (*NAMING_FORMATS, "--kv-profile off", "--kv-mean-bits"),
    "--losses": ("--heads", "--tokens", "--text-share", "--covariance", "--output"),
    "--protocol": ("--step",),
    "--heads": ("--tokens", "--text-share", "--covariance", "--output"),
    "--capacity": ("--kernels",),
    "doctor --verbose": ("--capacity", "--json"),
    "--tune": ("--model", "--report"),
    **dict.fromkeys(("--query-heads", "--kv-heads", "--head-dim"), ("--model", "--report")),
}
# What several processes cannot do together: mlx-lm divides no such model, or a file would hold the part of one rank.
SINGLE_PROCESS = (
    *("--adapter-path", "--draft-model", "--image", "--prompt-cache-file", "--load"),
    *("--kv-shadow", "--kv-mean-bits", "--memory"),
)
# The least and the greatest value of numbers, for one command where that is named.
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(
        ("--prefill-step-size", "--max-kv-size", "--samples", "--step", "--kv-shadow", "--context"), (1, math.inf)
    ),
    **dict.fromkeys(("--decode-concurrency", "--prompt-concurrency", "--max-queue", "--scale-usage"), (1, math.inf)),
    **dict.fromkeys(("evaluate --seeds", "evaluate --chunks"), (1, math.inf)),
    "evaluate --length": (2, math.inf),
    "--answer-tokens": (4, math.inf),
    **dict.fromkeys(("--num-draft-tokens", "--quantized-kv-start", "--seed", "--shots", "--needles"), (0, math.inf)),
    **dict.fromkeys(("--temp", "--top-k", "--sessions", "--idle-release"), (0, math.inf)),
    **dict.fromkeys(("--top-p", "--min-p", "--xtc-probability"), (0, 1)),
    "server --num-draft-tokens": (1, MAX_ROWS - 1),
    "--decode-share": (0, 0.95),
    "--repetition-penalty": (0, 10),
    **dict.fromkeys(("--presence-penalty", "--frequency-penalty"), (-2, 2)),
    "--repetition-context-size": (1, math.inf),
    "--xtc-threshold": (0, 0.5),
    "--port": (0, 65535),
    "--state-step": (32, math.inf),
}


def name_of(flag: str) -> str:
    """Return the name under which argparse keeps the value of a flag."""
    return flag.removeprefix("--").replace("-", "_")


def check_environment() -> None:
    """Raise ConfigError if a variable of ours is misspelled, as it would have no effect."""
    names = [API_KEY_VARIABLE, *(option.variable for option in OPTIONS.values())]
    for name in os.environ:
        if name.startswith(_PREFIX) and name not in names:
            nearest = difflib.get_close_matches(name, names, n=1, cutoff=0)[0]
            raise ConfigError(f"the environment variable {name} is unknown. Did you mean {nearest}? If not, unset it.")


def choose_backend(args: argparse.Namespace) -> None:
    """Compute with the backend of --backend or MLX_TQ_BACKEND, if the command has that flag."""
    if name_of(BACKEND.flag) in args:
        from mlx_tq.kernels import backend  # loads mlx, which --help does without

        backend.choose(read_options(args, os.environ)[BACKEND.flag] or AUTO)


def read_options(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of all options by flag, None for those that neither the command line nor `environ` has."""
    values = {flag: getattr(args, name_of(flag), None) for flag in OPTIONS}
    for flag, option in OPTIONS.items():
        if values[flag] is None and option.variable in environ and name_of(flag) in args:
            text = environ[option.variable]
            try:
                values[flag] = option.parse(text)
            except argparse.ArgumentTypeError as error:
                raise ConfigError(f"{option.variable}: {error}.") from error
            except ValueError as error:
                kind = option.parse.__name__
                raise ConfigError(f"{option.variable} is {text!r}; it must be of type {kind}.") from error
    return values


def check_flags(args: argparse.Namespace, active: Collection[str] = (), mentioned: Collection[str] = ()) -> None:
    """Raise ConfigError for a flag that has no effect, or that another one excludes.

    `active` has what is in effect without being typed. Flags that need one of `mentioned` may stay while it is off.
    """
    typed = _in_effect(args)
    in_effect = [*typed, *active]
    for flag in typed:
        for required in _rules(REQUIRES, args, flag):
            if not {*in_effect, *mentioned}.intersection(required.split(" or ")):
                raise ConfigError(f"{flag} requires {required}. Add it, or drop {flag}.")
    for flag in in_effect:
        for other in _rules(EXCLUDES, args, flag):
            if other in in_effect:
                raise conflict(flag, other)


def _in_effect(args: argparse.Namespace) -> list[str]:
    """Return the typed flags; one that is off with that value, such as `--kv-profile off`."""
    return [f"{flag} {value}" if value in (OFF, NONE) else flag for flag, value in args.typed.items()]


def _rules(table: dict[str, tuple[str, ...]], args: argparse.Namespace, flag: str) -> tuple[str, ...]:
    return table.get(flag, ()) + table.get(f"{args.command} {flag}", ())


def conflict(flag: str, other: str) -> ConfigError:
    return ConfigError(f"{flag} cannot be combined with {other}. Drop one of the two.")


def check_numbers(args: argparse.Namespace) -> None:
    """Raise ConfigError for a number that is out of range whatever the model."""
    for rule, (least, most) in _RANGES.items():
        *command, flag = rule.split()
        value = getattr(args, name_of(flag), None) if command in ([], [args.command]) else None
        if value is not None and not least <= value <= most:  # also refuses NaN
            valid = f"{least:g} or more" if most == math.inf else f"from {least:g} to {most:g}"
            raise ConfigError(f"{flag} is {value}; it must be {valid}.")
    tokens, may_be_unlimited = getattr(args, "max_tokens", None), args.command in ("generate", "chat")
    if tokens is not None and tokens < 1 and not (tokens == -1 and may_be_unlimited):
        unlimited = ", or -1 for all that the context allows" if may_be_unlimited else ""
        raise ConfigError(f"--max-tokens is {tokens}; it must be 1 or more{unlimited}.")
    if getattr(args, "kv_group_size", None) is not None and args.kv_bits is not None:
        import mlx.core as mx  # which --help does without

        try:
            mx.quantize(mx.zeros((1, args.kv_group_size)), group_size=args.kv_group_size, bits=args.kv_bits)
        except ValueError as error:
            raise ConfigError(f"--kv-bits {args.kv_bits} --kv-group-size {args.kv_group_size}: {error}") from error


def check_writable(flag: str, path: str | Path, kind: str = ".safetensors file") -> None:
    """Raise ConfigError if the file of a flag cannot be written, before the work that it is for."""
    file = Path(path)
    folder = file.resolve().parent
    if not is_replaceable(file):
        raise ConfigError(f"{flag} {file} is a folder, a device or a pipe; name the {kind} to write.")
    if not folder.is_dir():
        raise ConfigError(f"{flag} {file}: folder {folder} does not exist.")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{flag} {file}: folder {folder} is not writable.")


@dataclass(frozen=True)
class Request:
    """The settings of one run, checked and parsed once from flags and environment."""

    args: argparse.Namespace  # all flags of the command
    typed: Mapping[str, Any]  # values of options by flag, of the command line alone
    values: Mapping[str, Any]  # the same with those of the environment
    config: "KVConfig"
    rescue: "RescueConfig"
    prefix_cache: str | None  # folder, or "auto"; None if there is none
    recall_blocker: str | None  # the flag that keeps evicted tokens from being recalled

    @classmethod
    def from_args(cls, args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> "Request":
        """Raise ConfigError for a request that no model can meet. Typed flags override the environment."""
        from mlx_tq.config import PROFILES as CONFIGS  # loads mlx, which --help does without
        from mlx_tq.config import RescueConfig  # likewise

        check_numbers(args)
        typed, _ = _disable_recall(read_options(args, {}), args)
        values, recall_blocker = _disable_recall(read_options(args, environ), args)
        native = [flag for flag in ("--kv-bits", "--max-kv-size") if args.command == "generate" and flag in args.typed]
        chosen = [flag for flag in _in_effect(args) if flag in CACHE_FLAGS]
        if native and chosen and not make_config(typed, typed).is_off:
            raise conflict(native[0], chosen[0])
        config = CONFIGS[OFF] if native else make_config(values, typed)
        active = ["--kv-archive off" if values["--kv-archive"] is False else "--kv-archive on"]
        active += ["--kv-shadow"] if values["--kv-shadow"] is not None else []
        active += [_FP16_CACHE] if config.is_off and not native else []
        active += ["--kv-evict"] if config.evict else []
        active += ["--kv-recall auto"] if config.evict and config.evict.recalls else []
        default = AUTO if args.command == "chat" and config.evict else OFF
        given = {field: values[flag] for flag, field in RESCUE_FIELDS.items() if values[flag] is not None}
        rescue = RescueConfig(**({} if _is_overridden("--rescue", args, active) else {"service": default, **given}))
        active += ["--rescue"] if rescue.service != OFF else []
        prefix_cache = None if _is_overridden("--prefix-cache", args, active) else values["--prefix-cache"]
        prefix_cache = None if prefix_cache == OFF else prefix_cache
        active += ["--prefix-cache"] if prefix_cache else []
        active += ["--prompt-lookup on"] if getattr(args, "prompt_lookup", OFF) == "on" else []
        mentioned = [flag for flag in ("--rescue", "--prefix-cache") if values[flag] is not None]
        check_flags(args, active, mentioned)
        if recall_blocker and args.typed.get("--kv-recall", AUTO) != AUTO:
            raise conflict("--kv-recall", recall_blocker)
        if rescue.service != OFF:
            config = _evict_in_blocks(config, values, typed)
        return cls(args, typed, values, config, rescue, prefix_cache, recall_blocker)

    def change(self, saved: "KVConfig") -> "KVConfig":
        """Return a saved configuration with what the command line, not the environment, changes of it."""
        config = make_config(self.typed, self.typed, saved)
        return _evict_in_blocks(config, self.typed, self.typed) if self.rescue.service != OFF else config

    @property
    def changes_cache(self) -> bool:
        return any(self.typed[flag] is not None for flag in CACHE_FLAGS)

    @property
    def shadow(self) -> int | None:
        """Tokens after which the compressed cache is compared with mlx-lm's, which answers; None without."""
        every: int | None = self.values["--kv-shadow"]
        return every


def _disable_recall(values: dict[str, Any], args: argparse.Namespace) -> tuple[dict[str, Any], str | None]:
    """Return the values with --kv-recall off where nothing can be recalled, and the flag that is the reason."""
    blockers = ["--kv-shadow"] if values["--kv-shadow"] is not None else []
    blockers += [flag for flag in ("--draft-model", "--image") if flag in args.typed]
    if name_of("--kv-recall") not in args or values["--kv-archive"] is False or values["--kv-recall"] == OFF:
        return {**values, "--kv-recall": OFF}, None
    return ({**values, "--kv-recall": OFF}, blockers[0]) if blockers else (values, None)


def _is_overridden(flag: str, args: argparse.Namespace, active: Collection[str]) -> bool:
    """Return whether the environment's value of a flag does not go with what was typed."""
    in_effect = {*_in_effect(args), *active}
    required, excluded = (_rules(table, args, flag) for table in (REQUIRES, EXCLUDES))
    return flag not in args.typed and not (in_effect.issuperset(required) and in_effect.isdisjoint(excluded))


def make_config(values: Mapping[str, Any], typed: Mapping[str, Any], base: "KVConfig | None" = None) -> "KVConfig":
    """Return the configuration of the options; without a profile they change `base`, or else the default profile."""
    from mlx_tq.config import CHOOSING, KVConfig  # loads mlx, which --help does without

    changes = {field: values[flag] for flag, field in CONFIG_FIELDS.items() if values[flag] is not None}
    name = values["--kv-profile"]
    if "mean_bits" in changes and any(typed[flag] is not None for flag in CHOOSING_FORMATS):
        del changes["mean_bits"]  # of the environment
    elif "mean_bits" in changes:
        name = None
        changes |= {field: getattr(KVConfig, field) for field in CHOOSING}
    if name or base is None:
        config = KVConfig.from_profile(name or DEFAULT_PROFILE, **changes)
    else:
        config = replace(base, **changes)
    return replace(config, evict=make_eviction(values, typed, config.evict))


def _evict_in_blocks(config: "KVConfig", values: Mapping[str, Any], typed: Mapping[str, Any]) -> "KVConfig":
    """Return `config` with tokens evicted in blocks whose text can be found again, unless --kv-evict says otherwise."""
    evict = config.evict and make_eviction(values, typed, config.evict, granularity=_QUOTABLE_BLOCK)
    return replace(config, evict=evict)


def make_eviction(
    values: Mapping[str, Any], typed: Mapping[str, Any], base: "EvictConfig | None" = None, **defaults: Any
) -> "EvictConfig | None":
    """Return the eviction of the options, which change `base`; `defaults` are options of a policy that they name."""
    from mlx_tq.config import EvictConfig  # loads mlx, which --help does without
    from mlx_tq.policies import CalibratedPolicy, parse_policy  # likewise

    text = values["--kv-evict"]
    if not text:
        text, defaults = NONE if base is None else str(base.policy), {}  # a profile has chosen its options
    if text == NONE:
        return None
    calibration = values["--kv-calibration"]
    policy = parse_policy(text, **defaults, **({} if calibration is None else {"calibration": calibration}))
    if typed["--kv-calibration"] not in (None, getattr(policy, "calibration", None)):
        reason = f"has no effect on the policy {policy.name}"
        if isinstance(policy, CalibratedPolicy):
            reason = f"is not the calibration of --kv-evict {text}"
        raise ConfigError(f"--kv-calibration {calibration} {reason}. Drop one of the two.")
    base, recall = base or EvictConfig(), values["--kv-recall"]
    recall = base.recall if recall is None else int(recall) if recall.isdecimal() else recall
    fields = {"--kv-budget": "budget", **(RECALL_FIELDS if recall != OFF else {})}
    changes = {field: values[flag] for flag, field in fields.items() if values[flag] is not None}
    return replace(base, policy=policy, recall=recall, **changes)
