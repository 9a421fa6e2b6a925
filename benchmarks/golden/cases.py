"""What golden runs run: commands, requests to the server, and calls of the library. Tables only."""

from typing import Any, NamedTuple

Options = dict[str, Any]


class Command(NamedTuple):
    """Command lines that follow each other, without `python -m mlx_tq`.

    In them {tmp} is a fresh folder, {wide} the embedded model in float32, {text} a file with a page of text, {fact}
    one with a fact and a question, {long} a page and a half for a chat, {swept} the variants of a sweep, and {evict}
    the flags of `evict`.
    """

    lines: tuple[str, ...]
    evict: Options | None = None
    stdin: str = ""
    quiet: bool = False  # what it says on stderr is times
    embedder: str = "hashing"  # needs no weights


FACT = "The access code is 417295."
QUESTION = "What is the access code?"
# A small window, so that a page is mostly packed.
PACKED = "--kv-prefix 16 --kv-window 32 --prefill-step-size 128"
_GO_ON = f"generate --model {{wide}} --prompt-file {{text}} --ignore-chat-template -m 16 --json {PACKED}"
_ANSWER = f"generate --prompt-file {{fact}} -m 16 {PACKED}"
_READ = f"cache_prompt --model {{wide}} --prompt-file {{fact}} --prompt-cache-file {{tmp}}/cache {PACKED}"
_MEASURE = "--dtype float32 --chunks 1 --length 200 --step 64 --kv-prefix 8 --kv-window 16 --json -"
_TRI = {"policy": "triattention", "budget": "50%", "warmup": 128}


def _go_on(flags: str = "", **evict: Any) -> Command:
    return Command((f"{_GO_ON} {flags} {'--kv-recall off' if evict else ''} {{evict}}",), evict)


def _evict(**options: Any) -> Command:
    return _go_on(**{**_TRI, **options})


_TALK = f'{FACT}\nHow many trees has house 3?\n"""\n{{long}}\n"""\n{QUESTION}\n/stats\n'
_FILES = "/save {tmp}/chat.safetensors\n/reset\nHello.\n/load {tmp}/chat.safetensors\nWhat did I say?\n/stats\n"
_CHAT = "chat --model {wide} -m 8 --kv-prefix 4 --kv-window 32 --prefill-step-size 128 --temp 0 {evict}"

COMMANDS: dict[str, Command] = {
    # Generate: as the package comes, then in float32.
    "generate": Command((_ANSWER,)),
    "generate defaults": Command(("generate --prompt-file {text} --ignore-chat-template -m 16 --json",)),
    **{f"generate {name}": _go_on(f"--kv-profile {name}") for name in ("off", "safe", "balanced", "small")},
    **{
        f"generate {key}/{value}": _go_on(f"--kv-key {key} --kv-value {value} --kv-recent 64")
        for key, value in (
            ("tq3", "tq2"),
            ("q8~tq4", "tq4"),
            ("spectral14", "tq4"),
            ("q8+tq4+tq4+tq4+tq4+q8", "tq35"),
        )
    },
    "generate boundary": _go_on("--kv-profile small --kv-boundary 1 --kv-outlier 1.1"),
    "generate draft": _go_on("--draft-model {wide} --num-draft-tokens 3"),
    "generate draft evicting": _go_on("--draft-model {wide} --num-draft-tokens 3", policy="knorm", budget="50%"),
    "generate shown": Command((f"{_ANSWER} --verbose T {{evict}}",), {**_TRI, "budget": 200}),
    # Generate: eviction.
    "evict triattention": _evict(),
    "evict bytes": _evict(budget="2400KB"),
    "evict v2": Command((f"{_GO_ON} --kv-prefix 0 --kv-recall off {{evict}}",), {**_TRI, "mode": "v2", "segments": 4}),
    **{
        f"evict {name}": _go_on(policy=name, budget="50%", segments=4, granularity=8)
        for name in ("random", "recency", "streaming", "knorm")
    },
    # A prompt's cache in a file.
    "cache_prompt": Command(
        (
            _READ,
            f"generate --model {{wide}} -p '{QUESTION}' --prompt-cache-file {{tmp}}/cache -m 16 --json",
        )
    ),
    "cache_prompt evicting": Command(
        (
            f"{_READ} {{evict}}",
            "generate --prompt-file {text} --prompt-cache-file {tmp}/cache -m 16 --json",
        ),
        _TRI,
    ),
    # A file of statistics, and what evicts by it.
    "calibrate": Command(
        (
            "calibrate --dtype float32 --tokens 1000 -o {tmp}/stats.safetensors",
            f"{_GO_ON} --kv-recall off {{evict}}",
        ),
        {"policy": "triattention", "budget": "50%", "stats": "{tmp}/stats.safetensors"},
    ),
    "calibrate plain": Command(
        ("calibrate --text-share 1 --covariance --dtype float32 --tokens 300 -o {tmp}/stats.safetensors",)
    ),
    # Conversations.
    "chat": Command((f"{_CHAT} --rescue off",), stdin=_TALK),
    "chat evicting": Command((f"{_CHAT} --rescue off",), _TRI, _TALK + _FILES),
    "chat rescued": Command(
        (f"{_CHAT} --rescue auto --rescue-timeout 60",), {"policy": "recency", "budget": 400}, _TALK + _FILES
    ),
    # Measurements.
    "evaluate perplexity": Command((f"evaluate perplexity --profiles balanced,tq3/tq2:raw {_MEASURE}",)),
    "evaluate divergence": Command(
        (f"evaluate divergence --kv-profile balanced {_MEASURE} --length 330 {{evict}}",), {**_TRI, "warmup": 64}
    ),
    "evaluate formats": Command((f"evaluate formats --pairs tq4/tq4,spectral12/q8 {_MEASURE}",)),
    "evaluate needle": Command(
        (
            "evaluate needle --dtype float32 --profiles balanced,tq2/tq2 --lengths 400 --depths start --seeds 1 "
            "--step 128 --max-tokens 24 --kv-prefix 8 --kv-window 16 --json -",
        )
    ),
    "evaluate layers": Command(
        ("evaluate layers --dtype float32 --profiles small --length 200 --kv-prefix 8 --kv-window 16 --json -",)
    ),
    "evaluate spectrum": Command(("evaluate spectrum --dtype float32 --length 200 --json -",)),
    "evaluate drift": Command(
        (
            "evaluate drift --dtype float32 --profiles small --length 200 --steps 7,128 --kv-prefix 8 --kv-window 16 "
            "--json -",
        )
    ),
    "evaluate sweep": Command(
        (
            "evaluate sweep --dtype float32 --policies {swept} --retentions 50 --granularities 1 --triggers 32 "
            "--prefixes 8 --kinds single --lengths 300 --depths middle --warmup 64 --seeds 1 --chunks 1 --length 200 "
            "--step 64 --max-tokens 24 --kv-window 16 --json -",
        )
    ),
    # The rest.
    "doctor": Command(("doctor --json",)),
    "demo": Command(("demo",), embedder="none"),  # with one, its quotations depend on what is embedded when it asks
    "bench": Command(("bench --tokens 300 --dtypes float32 --rounds 1 --json -",), quiet=True),
}

# Requests that follow each other to one server, by its flags: path and body.
_SAY = "/v1/chat/completions"
SERVED: dict[str, tuple[str, Options | None, tuple[tuple[str, Options], ...]]] = {
    "server": (
        "--kv-profile small --kv-prefix 16 --kv-window 32",
        None,
        (
            (_SAY, {"messages": [{"role": "user", "content": f"{FACT} {QUESTION}"}], "max_tokens": 12}),
            ("/v1/completions", {"prompt": "{page}", "max_tokens": 16}),
            ("/v1/completions", {"prompt": "{page}", "max_tokens": 24}),
        ),
    ),
    "server evicting": (
        "--kv-prefix 16 --kv-window 32 --prefill-step-size 128",
        _TRI,
        (("/v1/completions", {"prompt": "{page}", "max_tokens": 16}),),
    ),
}

# Calls of the library: ten architectures, each under four configurations in three ways.
ARCHITECTURES = (
    "llama",
    "phi3",  # heads of 96
    "glm4",  # interleaved RoPE of half a head
    "qwen3_next",  # linear attention, experts
    "gemma3_text",  # sliding windows
    "gemma4_text",  # layers that share a cache, heads of 512
    "gpt_oss",  # sinks, sliding windows
    "falcon_h1",  # caches in a list
    "deepseek_v2",  # keys of 192 beside values of 128; refused by policies that ask queries
    "afm7",  # counts the keys; refused by all policies
)
DRAFTED = ("llama", "phi3", "glm4", "deepseek_v2")  # the others' caches cannot go back, or are shared by layers
REGIONS = {"prefix": 8, "window": 8}
_ROUNDS = {"budget": "50%", "trigger": 8}
CONFIGS: dict[str, Options] = {
    "balanced": {"key": "q8", "value": "tq4"},
    "small": {"key": "tq4", "value": "tq4"},
    "triattention": {"key": "q8", "value": "tq4", "evict": {"policy": "triattention", "warmup": 48, **_ROUNDS}},
    "knorm": {"key": "tq4", "value": "tq4", "evict": {"policy": "knorm", **_ROUNDS}},
}
# On one model each, generating alone: options that no flag has, and the other forms of storage.
STORAGES: dict[str, Options] = {
    "haar": {"rotation": "haar", "seed": 7},
    "raw": {"key": "tq4", "key_scale": "raw", "value_scale": "matched"},
    "wide scale": {"key": "tq3", "key_scale": "ls", "wide_scale": True},
    "two key formats": {"key": "q8~tq3", "recent": 32},
    "boundary": {"key": "tq2", "boundary": 1, "outlier": 1.0},
}
EVICTIONS: dict[str, Options] = {
    "tokens": {"budget": 64},
    "highest": {"evict": "highest"},
    "v1": {"mode": "v1"},
    "v2": {"mode": "v2", "segments": 3},
    "v3 aggregation": {"aggregation": "v3"},
    "expected attention": {"aggregation": "expected_attention"},
    "segment tokens": {"segment_tokens": 24},
    "ema": {"ema": 0.3},
    "recalibrate": {"recalibrate": 64},
    "without nope": {"nope": False},
    "blocks by mean": {"granularity": 8, "pooling": "mean"},
    "blocks by top": {"granularity": 16, "pooling": "top"},
    "random": {"policy": "random", "seed": 3},
    "recency": {"policy": "recency"},
    "streaming": {"policy": "streaming"},
}
