"""Why what golden runs answer today differs from what they answered at commit f34aaad, by kind of difference."""

from benchmarks.golden.compare import Reason

_NONE = r'"\(nothing\)"'  # stands for a field or a line that is not there
_FP16 = "fp16 is two bytes a number, also for a model in float32: counted with four, the saving looked twice as large"
_GROW = "buffers grow with use; each region held room for its longest from the start"
_PLAN = r"/ (?:plan|err|0) / \d+$"  # a line of a plan on the screen
_SIZE = r"[\d.]+ [kM]?B"
_KINDS = r"(?:triattention|knorm|recency|streaming|random)"
_SHOWN_AGAIN = "a loaded conversation shows its plan and its last exchange"

# From before.json to then.json: what the code changed.
CODE = [
    Reason(
        "fields of `evaluate perplexity`",
        "it also says bytes, rounds and what was kept, for arms with and without eviction",
        r"^evaluate perplexity .* / (?:nbytes|kept|rounds)$",
        _NONE,
    ),
    Reason("bytes that a cache holds", _GROW, r"/ (?:nbytes|compressed)$", less=True),
    Reason(
        "budget in bytes",
        f"{_GROW}: so 2400 KB hold 125 tokens, not 61",
        r"^evict bytes .*(?:tokens|evicted|retention)$",
    ),
    Reason("fp16_nbytes", _FP16, r"/ fp16_nbytes$", less=True),
    Reason("ratio", "both of the above", r"cache / ratio$"),
    Reason("planned bytes of all layers", _FP16, _PLAN, r'"planned .* bytes of .*', r'"planned .* bytes of .*'),
    Reason(
        "a layer's line in the plan",
        _FP16,
        _PLAN,
        rf'"[\d-]+ (\S+) (\S+) {_SIZE} {_SIZE}(.*)"',
        rf'"[\d-]+ \1 \2 {_SIZE} {_SIZE}\3"',
    ),
    Reason(
        "type in the plan",
        "a plan names the model's type",
        _PLAN,
        r'"in the model\'s own type: (.*)',
        r'"in the model\'s own type, (?:float32|bfloat16): \1',
    ),
    Reason(
        "policy in the plan",
        "a plan names every option of the policy that is no default, so that it can be typed again",
        _PLAN,
        rf'"eviction: {_KINDS} \(v\d\) keeps (.* of the tokens|[\d,]+ tokens)(.*)"',
        rf'"eviction: {_KINDS[:-1]}|expected_attention)\S* keeps (?:\1|125 tokens)\2"',
    ),
    Reason("policy in JSON", "the same", r"eviction / policy$", rf'"{_KINDS}"', rf'"{_KINDS}\S*"'),
    Reason("`phases`", "is called `thresholds`", r"plan / (?:phases|thresholds)$"),
    Reason("`cached_tokens`", "what came from the store of prefixes, which is new: 0", r"/ cached_tokens$", _NONE, "0"),
    Reason("`recalled`", "what came back from the archive, which is new: nothing", r"/ recalled$", _NONE, "null"),
    Reason("`rescued`", "what the rescue service brought back, which is new: nothing", r"/ rescued$", _NONE, "null"),
    Reason("`recall`", "the same: off", r"eviction / recall$", _NONE, '"off"'),
    Reason("`archive_limit`", "of the disk, which is new: the default", r"eviction / archive_limit$", _NONE, "null"),
    Reason(
        "bytes after a run",
        f"{_FP16}; {_GROW}",
        r"/ err / \d+$",
        r'"KV cache: (.*) tokens in .*',
        r'"KV cache: \1 tokens in .*',
    ),
    Reason("rounds", "one round is no rounds", r"/ err / \d+$", r"(.*) in 1 rounds (.*)", r"\1 in 1 round \2"),
    Reason(
        "warning of eviction",
        "names --kv-recall, which is new",
        r"/ err / \d+$",
        '"warning: .*evicted.*',
        '"warning: .*evicted tokens are gone, and the answer may miss what they said.*',
    ),
    Reason(
        "a chat's bytes",
        f"{_FP16}; {_GROW}",
        r"^chat",
        r'"(.* rescued|KV cache) [\d.]+ [kM]B, fp16 .*"',
        r'"\1 [\d.]+ [kM]B, fp16 .*"',
    ),
    Reason("a chat's start", "says whether text is rescued", r"^chat", _NONE, '"rescue: auto"'),
    Reason("a loaded chat", _SHOWN_AGAIN, r"^chat (?:evicting|rescued) / 0 / err"),
    Reason("words of `calibrate`", "it says how much of the statistics is the text's", r"^calibrate / 0 / err"),
    Reason(
        "statistics of `calibrate`",
        "a quarter is the text's, and the questions share no wording any more with those that `mlx_tq.evaluate` asks",
        r"^calibrate / 2",
    ),
    Reason(
        "`demo`",
        "it has no flag for plain keys; where they are the default in the code, it prints what it printed, but that "
        "the last paragraph of the text that it is told asks, too, and is answered by a quotation; a policy that keeps "
        "more has to lose more tokens before it loses the fact, so 40 % stay in place of 50",
        r"^demo",
    ),
    Reason("`doctor`", "float32 sums in another order; at most 1e-5 is allowed", r"^doctor .*measured$"),
    Reason("trellis codes", "tcq4, tcq3 and tcq2 are new", r"^(?:library qwen3 tcq\d|doctor .*/ checks / \d+$)", _NONE),
    Reason(
        "a rescued chat that is told a text",
        "its last paragraph asks, too, and is answered by a quotation, so that the turns after it see other tokens",
        r"^chat rescued / 0 / out / \d+$",
    ),
    Reason("names in a sweep", "a variant is named as --kv-evict takes it", r"^evaluate sweep .*(?:name|variant)$"),
]

# From then.json to today.json: what other defaults changed. Keys are conditioned, a policy that asks queries knows
# those of questions, the dims that RoPE leaves alone do not count, and TriAttention's scores are weights of attention.
# Tokens leave in blocks of 32; what leaves is archived, and comes back. No run that packs nothing, or names all this,
# differs.
_PACKS = r"^(?!generate off|calibrate plain|evaluate spectrum|doctor|demo|bench).*"
_CONDITIONED = "keys are conditioned, and nothing is packed before the first 128 tokens were read: other rounding"
_ROUNDS = (
    "keys are conditioned, so that nothing is packed before 128 tokens were read, and nothing unpacked leaves; "
    "blocks of 32 leave whole"
)
_KNOWN = (
    "where a policy asks queries, they are those of questions, the dims that RoPE leaves alone do not count, and "
    "scores are weights of attention"
)

DEFAULTS = [
    Reason("plan", "it names the conditioning of keys", _PACKS, _NONE, '"keys are stored less the mean .*'),
    Reason("greedy tokens", f"{_CONDITIONED}; {_KNOWN}", rf"{_PACKS}/ (?:tokens|text|drafted|answer)$"),
    Reason("log-probabilities", "the same", rf"{_PACKS}/ logprob$"),
    Reason(
        "tokens that stay",
        f"{_ROUNDS}; {_KNOWN}",
        rf"{_PACKS}/ (?:(?:live|stored|packed)(?: / \d+)?|kept|retention|rounds)$",
    ),
    Reason("tokens and rounds of eviction", "the same", rf"{_PACKS}/ evicted(?: / \d+)?$"),
    Reason(
        "bytes that a cache holds",
        "means of blocks are kept, and the buffer of unpacked tokens has held the first 128; less where more left",
        rf"{_PACKS}/ (?:nbytes|compressed|ratio)$",
    ),
    Reason(
        "budget in bytes",
        "the same, and blocks leave, whose gaps take fewer bytes: 2400 KB hold 105 tokens beside it",
        r"^evict bytes .*budget_tokens$",
    ),
    Reason(
        "planned bytes of all layers", "means of blocks, and the first 128 tokens", _PLAN, '"planned .*', '"planned .*'
    ),
    Reason(
        "a layer's line in the plan",
        "the same",
        _PLAN,
        rf'"([\d-]+) (\S+) (\S+) {_SIZE} ({_SIZE}.*)"',
        rf'"\1 \2 \3 {_SIZE} \4"',
    ),
    Reason(
        "bytes after a run", "the same", r"/ err / \d+$", r'"KV cache: (.*) tokens in .*', r'"KV cache: \1 tokens in .*'
    ),
    Reason(
        "policy in the plan",
        f"a plan names no default; {_KNOWN}",
        _PLAN,
        r'"eviction: (\w+)\S* keeps .*',
        r'"eviction: \1\S* keeps .*',
    ),
    Reason("policy in JSON", "the same", r"eviction / (?:policy|calibration)$"),
    Reason(
        "a number that an evicting chat says",
        "by other statistics other tokens stay, and the model guesses another one",
        r"^chat evicting / 0 / (?:out|err) / \d+$",
        r'"\d+"',
        r'"\d+"',
    ),
    Reason(
        "a chat's bytes and tokens",
        "the same",
        r"^chat",
        r'".*(?: rescued|KV cache) [\d.]+ [kM]B, fp16 .*"',
        r'".*(?: rescued|KV cache) [\d.]+ [kM]B, fp16 .*"',
    ),
    Reason(
        "a refusal",
        "so short a text packs nothing any more, as no key is packed before 136 tokens were read: it says so",
        r"^evaluate (?:formats|layers)",
    ),
    Reason(
        "a note in the plan",
        "says which keys are not weighted",
        r"^library deepseek_v2 .*plan / \d+$",
        new=".*(?:keys not weighted|joined to the rest|as in MLA).*",
    ),
    Reason("figures of `evaluate`", f"{_CONDITIONED}; {_KNOWN}", r"^evaluate (?!formats|spectrum).*results"),
    Reason(
        "what evicting runs say",
        "what leaves is archived, in blocks of 32, and comes back for a question: other tokens stay, none are gone",
        r"^(?:cache_prompt evicting|chat (?:evicting|rescued)|generate shown|server evicting) / ",
    ),
]
