"""TriAttention V3 in llama.cpp and its ports, then longctx, which brings back what it evicted."""

from benchmarks.published.rows import (
    BUILT,
    FORMATS,
    NOT_BUILT,
    NOT_MEASURED,
    NOT_REACHED,
    REFUTED,
    SMALL,
    Row,
    answers,
    at,
    change,
    hybrid,
    nbytes,
    pair,
    ratio,
    smollm2,
    smollm2_text,
    text,
)
from benchmarks.rescue.ramp_cells import outcome
from benchmarks.tables.eviction import ONCE, POLICY, QUESTIONS, SWEEP, find
from benchmarks.tables.markdown import report

_PAIRS = at("formats", "all-formats", "quality_all_formats.json")
_FACTS = at("eviction", "facts", "quality_sweep.json")
_TEXT = at("eviction", "text", "quality_sweep.json")
_OPTIONS = at("eviction", "options", "quality_sweep.json")
_COST = at("eviction", "cost", "evict_cost.json")
_HYBRID = at("scores", "the-dims-that-rope-leaves-alone", "quality_sweep_hybrid.json")
_KEYS = at("scores", "packed-keys", "evict_formats.json")
_REAL = at("README", "three-models", "quality_sweep_smollm2.json")
_GEMMA, _SMOLLM2 = "four_arms_gemma3-270m_32000.json", "four_arms_smollm2_2000.json"
_ARMS = at("README", "four-arms", _GEMMA, "four_arms_smollm2_7500.json")
_RAMP = at("rescue", "the-ramp", "rescue_ramp.json")
_MINILM = at("rescue", "the-ramp", "rescue_ramp_minilm.json")
_ROUNDS = "[Rounds](../how/rounds.md)"
_EVICT = "[Evict](../guides/evict.md)"
_ASKED = "triattention:calibration=hybrid_questions.safetensors"
_V1, _V2 = f"{POLICY}:mode=v1", f"{POLICY}:mode=v2"


def eviction() -> list[Row]:
    """What stays, what it costs, on which models."""
    cost = [row["percent"] for row in report("evict_cost.json")["rows"]]
    keys = {
        key: [row["jaccard_0.1"] for row in report("evict_formats.json")["rows"] if row["key"] == key]
        for key in ("fp8", "q8", "tq4")
    }
    unrotated = f"{POLICY}:score_unrotated_dims=on"
    stack = 512 / nbytes("q8", "tq4", normalized=True) / 0.9
    often, seldom = (text(POLICY, 25, text="1 x 3000", trigger=trigger) for trigger in (32, 2048))
    found = [r["verdict"] for r in report("quality_needle_default.json")["results"].values() if r["name"] == "balanced"]
    return [
        Row(
            "how it is measured: three chunks, steps of 512, rounds counted, the exact words",
            "built",
            BUILT,
            "the same; a needle that fp16 misses is void, packed tokens are counted",
            "[Measurements](README.md#how-to-read-the-tables)",
        ),
        Row("V1, V2, V3: whole, in segments, in segments behind a sinks", "built", BUILT, "`mode=`", _ROUNDS),
        Row(
            "defaults: sinks 128, window 128, 8 segments, warm-up 1,024",
            "the same",
            BUILT,
            "the same",
            "[Flags](../reference/flags.md)",
        ),
        Row(
            "V3 at 90 %: perplexity",
            "+0.006 % (+0.31 % in another table), Qwen2.5-7B, 32K; -0.002 % at 64K",
            SMALL,
            f"{_arm(_GEMMA, 'off@90%')}, Gemma 3 270M, 32,000 tokens; at 1,000 tokens {smollm2_text(POLICY, 90)} on "
            f"SmolLM2-135M and, with q8/tq4 keys and values, {text(POLICY, 90)} on the embedded model",
            f"{_ARMS}; {_TEXT}; {_REAL}",
        ),
        Row("V1 at 90 %: perplexity", "+1.20 %", NOT_REACHED, text(_V1, 90), _TEXT),
        Row(
            "V2 is worse than V1 for perplexity, at 90 %",
            "+4.49 against +1.20 %",
            REFUTED,
            f"{text(_V2, 90)} against {text(_V1, 90)}: no difference",
            _TEXT,
        ),
        Row(
            "V3, V1 and V2 at 85 %: perplexity",
            "+0.48, +2.25 and +8.38 %",
            NOT_REACHED,
            f"{text(POLICY, 85)} and {text(_V1, 85)}; V2 not measured",
            _TEXT,
        ),
        Row(
            "V3, TurboQuant+ and both, beside 16 bits: perplexity",
            "+0.31, +0.55 and +0.84 %",
            SMALL,
            f"{_arms(_GEMMA)}, Gemma 3 270M, 32,000 tokens; {_arms('four_arms_smollm2_7500.json')}, SmolLM2-135M, "
            "7,500 tokens; statistics by default",
            _ARMS,
        ),
        Row(
            "the same: time of a whole run",
            "1.01, 1.18 and 1.19 times that of 16 bits",
            NOT_MEASURED,
            f"on a GPU. On two CPU cores, beside other work: {_seconds('off@90%')}, {_seconds('balanced')} and "
            f"{_seconds('balanced@90%')}",
            at("README", "four-arms", _SMOLLM2),
        ),
        Row(
            "V3 at 90 % finds a needle at start, middle and end",
            "3 of 3 at 32K and 64K",
            NOT_REACHED,
            f"{answers(POLICY, 90, kind='single')}; calibrated on questions {answers(QUESTIONS, 90, kind='single')}",
            _FACTS,
        ),
        Row(
            "V3 keeps what V1 and V2 lose, at 90 %",
            "V1 loses the end, V2 the start",
            REFUTED,
            f"of four codes V3 finds {answers(POLICY, 90)}, V1 {answers(_V1, 90)}, V2 {answers(_V2, 90)}, chance "
            f"{answers('random', 90)}",
            _FACTS,
        ),
        Row(
            "V3 at 85 %: needle",
            "2 of 3, and a part of the third",
            NOT_REACHED,
            answers(POLICY, 85),
            _FACTS,
        ),
        Row(
            "V3 beside chance on a real model, needle tokens alive at 90 %",
            "a control was run; no figure",
            BUILT,
            f"on SmolLM2-135M {smollm2('triattention', 90)}, learned from text alone {smollm2(POLICY, 90)}, at random "
            f"{smollm2('random', 90)}",
            _REAL,
        ),
        Row(
            "the highest scores leave (the text of V1 and V2 says so)",
            "the abstract says the lowest",
            REFUTED,
            f"needle tokens alive and answers at 75 %: {answers(f'{POLICY}:evict=highest', 75)}, where the lowest "
            f"leave {answers(POLICY, 75)}",
            _FACTS,
        ),
        Row(
            "sinks of 128 or 256",
            "no difference",
            SMALL,
            f"of 0 or 32, no difference: {answers(POLICY, 90, sinks=0)} and {answers(POLICY, 90)}",
            _OPTIONS,
        ),
        Row(
            "several needles",
            "not measured there",
            BUILT,
            f"four codes; calibrated on questions {answers(QUESTIONS, 90)} at 90 %, {answers(QUESTIONS, 50)} at 50 %",
            _FACTS,
        ),
        Row(
            "retention from 95 to 50 %",
            "planned",
            BUILT,
            f"nine shares: {_found(95)} of 12 at 95 %, {_found(75)} at 75, {_found(50)} at 50",
            _FACTS,
        ),
        Row(
            "ten times less (the TriAttention paper, on reasoning)",
            "no safe point found",
            NOT_REACHED,
            f"at 10 % {answers(QUESTIONS, 10)}, calibrated on questions; reasoning not measured",
            _FACTS,
        ),
        Row(
            "hybrids: needle lost in the middle and at the end at 90 %",
            "Qwen3.5-27B and 35B-A3B: 1 of 3 each",
            SMALL,
            f"kept in blocks of 32 by questions: {hybrid(_ASKED, 90, 32)}, at random {hybrid('random', 90, 32)}; token "
            f"by token lost here too: {hybrid(_ASKED, 90)}, random {hybrid('random', 90)}; a hybrid of 3.65 million "
            "weights",
            _HYBRID,
        ),
        Row("hybrids: perplexity", "+0.29 and +0.21 %", NOT_MEASURED, "needles alone were measured"),
        Row(
            "score the dims that RoPE leaves alone",
            "proposed, untested",
            REFUTED,
            f"{hybrid(unrotated, 90)} against {hybrid(POLICY, 90)} at 90 %; off by default",
            _HYBRID,
        ),
        Row(
            "leave the first layers out of the score",
            "+0.94 and +0.97 % (one, two; 7B), -0.10 % (27B hybrid); needles no better; off",
            NOT_MEASURED,
            "`skip_layers=`, off",
            _EVICT,
        ),
        Row(
            "queries are seen before RoPE, and only until they are enough",
            "a callback that is taken away, which saves 6 s of a run; in vLLM a custom operation",
            BUILT,
            "RoPE is hooked; a layer looks at queries only in passes that it learns from",
            _ROUNDS,
        ),
        Row("environment variables beside flags", "built", BUILT, "`MLX_TQ_*`", "[Flags](../reference/flags.md)"),
        Row("128K tokens and more; reasoning; several turns", "open questions", NOT_MEASURED, "-"),
        Row(
            "TurboQuant+: q8_0 keys, turbo3 values",
            "2.6 times less, +0.55 %",
            SMALL,
            f"q8/tq3: {ratio('q8', 'tq3')} times less, {change(pair('q8/tq3'))}; the embedded model, plain keys",
            _PAIRS,
        ),
        Row(
            "TurboQuant+: needles",
            "no loss",
            SMALL,
            f"`balanced` finds {found.count('PASS')} of {len(found)} at 2,000 tokens; the embedded model",
            at("profiles", "needles", "quality_needle_default.json"),
        ),
        Row(
            "TurboQuant+ and V3 together at 90 %: memory",
            "2.9 times less; 2.96 in vLLM",
            NOT_REACHED,
            f"{stack:.2f} by definition (`balanced`, all packed, 90 %)",
            FORMATS,
        ),
        Row(
            "cost of V3",
            "172 s in place of 171 (32K, Apple M5 Max)",
            BUILT,
            f"a round is {min(cost):.2f} to {max(cost):.2f} % of the prefill of three models, on two CPU cores; "
            "no time on a Mac",
            _COST,
        ),
        Row(
            "17 offsets as one sum",
            "9.5 times faster scores",
            BUILT,
            "one virtual query, scored by a kernel in one pass over packed keys",
            _ROUNDS,
        ),
        Row(
            "calibration during the run, anew, or as a moving mean",
            "built; no figure of quality",
            BUILT,
            f"`warmup=`, `recalibrate=`, `ema=`: {_rounds(POLICY)}, {_rounds(f'{POLICY}:recalibrate=256')}, "
            f"{_rounds(f'{POLICY}:ema=0.1')} of 12 at 75 %, rounds while reading",
            _OPTIONS,
        ),
        Row(
            "vLLM on AMD MI300X",
            "perplexity +0.34 %, 4 bits alone +0.18 %; the needle in the middle lost in part",
            NOT_BUILT,
            "no vLLM, no ROCm",
        ),
        Row("evicted rows masked in place", "vLLM", NOT_BUILT, "rows that stay are gathered", _ROUNDS),
        Row(
            "TurboQuant in vLLM: bytes",
            "3.85 times less (4 bits), 2.67 (FP8 keys, 4-bit values)",
            NOT_REACHED,
            f"{ratio('tq4', 'tq4')} and {ratio('q8', 'tq4')} with normalized keys, "
            f"{ratio('tq4', 'tq4', normalized=False)} and {ratio('q8', 'tq4', normalized=False)} with plain ones",
            FORMATS,
        ),
        Row(
            "do FP8 keys change who is evicted",
            "suspected, not measured",
            BUILT,
            "of the tenth that leaves, Jaccard with fp16 keys on three models: "
            + ", ".join(f"{key} {min(found):.2f} to {max(found):.2f}" for key, found in keys.items()),
            _KEYS,
        ),
        Row(
            "fewer, larger rounds",
            "suspected to harm",
            BUILT,
            f"perplexity at 25 %, a round each 32 and each 2,048 tokens: {often} and {seldom}; more stays "
            "between larger ones",
            _OPTIONS,
        ),
        Row(
            "Mistral-7B, Qwen3-8B, Qwen3-30B-A3B",
            "run in vLLM",
            NOT_MEASURED,
            "architectures are tested as small random models; no model of that size was run",
        ),
        Row(
            "packed cache and eviction in Qwen3-Next",
            "stopped by vLLM's page sizes",
            BUILT,
            "layers with linear attention keep mlx-lm's caches",
            _HYBRID,
        ),
        Row("models with latent attention (MLA)", "planned", NOT_BUILT, "V3 refuses them by name", _EVICT),
        Row("models without RoPE (Jamba)", "cannot be scored", BUILT, "refused by name; other policies work", _EVICT),
    ]


def rescue() -> list[Row]:
    """What a service brings back."""
    cells = report("rescue_ramp.json")["cells"]
    gone = [c for c in cells.values() if c["arm"] == "rescue" and not c["live"]]
    back = sum(outcome(c, cells) == "rescue" for c in gone)
    missed = sum(c["verdict"] != "PASS" for c in cells.values() if c["arm"] == "evict" and not c["live"])
    longest = {
        name: sum(
            c["verdict"] == "PASS"
            for c in report(name)["cells"].values()
            if (c["arm"], c.get("budget"), c["rung"]) == ("rescue", "90%", 3000)
        )
        for name in ("rescue_ramp.json", "rescue_ramp_minilm.json")
    }
    lengths = report("rescue_overhead.json")["lengths"].values()
    waits, reads = ([100 * found[part] for found in lengths] for part in ("share", "reading"))
    speed = report("rescue_latency.json")["results"]["20000 spans"]["retrieve"]
    return [
        Row(
            "a fact that eviction took is answered with rescue, missed without",
            "4 of 4 (Qwen3.5-2B, a hybrid)",
            SMALL,
            f"{back} of {len(gone)} facts that left whole; without {len(gone) - missed}; the embedded model, no hybrid",
            _RAMP,
        ),
        Row("lengths", "32K, 64K, 128K, 256K", NOT_REACHED, "1,000 to 3,000 tokens", _RAMP),
        Row(
            "nothing is lost by rescue",
            "no case of it",
            NOT_REACHED,
            f"at 3,000 tokens and 90 % {longest['rescue_ramp.json']} of 3 with the hashing embedder, "
            f"{longest['rescue_ramp_minilm.json']} of 3 with MiniLM, 3 of 3 without rescue",
            f"{_RAMP}; {_MINILM}",
        ),
        Row(
            "time of both turns, against eviction alone",
            "20 % more at 32K, 3 % at 256K",
            NOT_REACHED,
            f"waiting and computing {min(waits):.1f} to {max(waits):.1f} %, reading the quotation {min(reads):.0f} to "
            f"{max(reads):.0f} %, at 1,000 and 2,000 tokens",
            at("rescue", "what-it-costs", "rescue_overhead.json"),
        ),
        Row(
            "spans of one session",
            "19,427; no time of a question",
            BUILT,
            f"at 20,000 a question takes {speed['p50_ms']} ms (95 %: {speed['p95_ms']})",
            at("rescue", "speed", "rescue_latency.json"),
        ),
        Row(
            "longctx-svc: write and retrieve calls, sessions, an embedder",
            "built",
            BUILT,
            "both dialects; words and vectors together",
            "[Service](../reference/service_api.md)",
        ),
        Row(
            "what left comes back before a turn",
            "in ChatSession alone",
            BUILT,
            "in `Session`, the chat and the server; `rehydrate` for loops of one's own",
            _ROUNDS,
        ),
        Row(
            "V3 over packed keys in the Swift port",
            "missing there",
            BUILT,
            "policies score packed rows",
            _KEYS,
        ),
        Row(
            "evicting makes the first turn faster",
            "66.9 s in place of 76.3 at 128K, slower at 32K, 64K and 256K",
            NOT_MEASURED,
            "at such lengths",
        ),
        Row("MRCR v2 at 1M tokens (longctx alone)", "in another report", NOT_MEASURED, "-"),
    ]


def _arm(file: str, name: str) -> str:
    return change(report(file)["results"][name])


def _arms(file: str) -> str:
    return f"{_arm(file, 'off@90%')}, {_arm(file, 'balanced')} and {_arm(file, 'balanced@90%')}"


def _seconds(name: str) -> str:
    found = report(_SMOLLM2)["results"]
    return f"{found[name]['seconds'] / found['off']['seconds']:.2f}"


def _found(share: float) -> int:
    found = find(SWEEP, {**ONCE, "variant": POLICY, "retention": share})
    return sum(r["verdict"] == "PASS" for r in found)


def _rounds(variant: str) -> int:
    found = find(SWEEP, {**ONCE, "once": False, "variant": variant, "retention": 75})
    return sum(r["verdict"] == "PASS" for r in found)
