"""TurboQuant on Ascend, tq3_0 and TBQ4_0."""

from benchmarks.published.rows import (
    BUILT,
    FORMATS,
    NOT_BUILT,
    NOT_MEASURED,
    NOT_REACHED,
    REACHED,
    REFUTED,
    SMALL,
    Row,
    at,
    change,
    kld,
    nbytes,
    on_real_models,
    one_layer,
    pair,
)
from benchmarks.tables.markdown import report
from mlx_tq.codec.formats import get_format

_PAIRS = at("formats", "all-formats", "quality_all_formats.json")
_WITH_KERNELS = at("formats", "pairs-with-kernels", "quality_formats.json")
_SCALES = at("codec", "scale-rules", "quality_scales_key.json")
_LAYERS = at("codec", "layer-by-layer", "quality_layers.json")
_ABLATION = at("codec", "rotations-blocks-means", "quality_ablation.json")
_PROFILES = at("README", "three-models", "quality_profiles_smollm2.json", "quality_profiles_gemma3-270m.json")
_DECODE = at("speed", "one-layer", "decode_attention.json")
_REAL = at(
    "formats",
    "the-reports-formats-on-real-models",
    "quality_reports_smollm2.json",
    "quality_reports_gemma3-270m.json",
)
_KERNELS = "[Kernels](../how/kernels.md)"


def ascend() -> list[Row]:
    """Qwen3-14B on Ascend 910B/C."""
    scales = report("quality_scales_key.json")["results"]
    renormed, ours = (
        {bits: kld(scales[f"tq{bits}:{rule}/fp16"]) for bits in (4, 3)} for rule in ("matched", "unbiased")
    )
    layers = [r for r in report("quality_layers.json")["results"].values() if "least" in r]
    least = {name: min(r["least"] for r in layers if r["name"] == name) for name in ("balanced", "small")}
    error = pair("tq4/tq4", "formats")["key_error"]
    return [
        Row(
            "bytes of a vector of 128",
            "132 (a byte for each 4-bit code): 1.94 times less",
            REACHED,
            f"{nbytes('tq4')}: {256 / nbytes('tq4'):.2f} times less",
            FORMATS,
        ),
        Row(
            "16 levels are better than 8 and a QJL bit",
            "QJL left out; no figure",
            SMALL,
            f"KLD with 4-bit values: tq4 keys {kld(pair('tq4/tq4'))}, tq35 keys {kld(pair('tq35/tq4'))}",
            _PAIRS,
        ),
        Row(
            "the decoded vector is given its norm again",
            "built; no figure",
            BUILT,
            f"`matched`; the default makes inner products right. KLD of keys at 4 bits {renormed[4]} and {ours[4]}, "
            f"at 3 bits {renormed[3]} and {ours[3]}",
            _SCALES,
        ),
        Row(
            "a Haar matrix for each layer",
            "built; no figure",
            BUILT,
            "one Hadamard round; Haar is no better",
            _ABLATION,
        ),
        Row(
            "cosine of keys and values before and after",
            "at least 0.9999",
            REFUTED,
            f"keys at 4 bits have a squared error of {error:.4f} of their squared norm, a cosine of about "
            f"{1 - error / 2:.3f}; what it was compared with is not said",
            _WITH_KERNELS,
        ),
        Row(
            "hidden states, all layers",
            "cosine at least 0.9999 in the prompt, 0.999 at the first token, device against CPU",
            NOT_MEASURED,
            f"against an fp16 cache, another question, the least is {least['balanced']:.4f} (`balanced`) and "
            f"{least['small']:.4f} (`small`), in bf16",
            _LAYERS,
        ),
        Row(
            "codes, device against CPU",
            "99.3 % equal in the prompt, at least 97.6 in each layer; 99.8 % at the first token",
            SMALL,
            "99.90 % in bf16, all in float32: the kernels on the simulator against mlx's operations",
            "[Codec](codec.md#layer-by-layer)",
        ),
        Row(
            "decoding against 16 bits",
            "5.56 against 3.15 tok/s: 1.76 times",
            NOT_MEASURED,
            "of a whole model. One layer's attention on two CPU cores at 8,192 tokens, `small`: "
            f"{one_layer('float32', 8192):.1f} times mlx's own in float32, {one_layer('bfloat16', 8192):.1f} in bf16",
            _DECODE,
        ),
        Row("prompt against 16 bits", "5,240 against 5,467 ms", NOT_MEASURED, "-"),
        Row("whole run against 16 bits", "4.29 against 2.72 tok/s", NOT_MEASURED, "-"),
        Row("Ascend kernels", "910B/C, 950", NOT_BUILT, "Metal and CUDA texts, and mlx's operations", _KERNELS),
        Row("Qwen3-14B", "two answers shown", NOT_MEASURED, "no model of that size was run"),
    ]


def tq3_0() -> list[Row]:
    """llama-turboquant, phases 1 to 3."""
    rows = 8 * 80 * 73728
    keys = pair("tq3/fp16", "formats")
    real = {name: kld(pair(f"{name}:plain/fp16", "reports_smollm2")) for name in ("tq3_0", "tq3")}
    gemma = {name: kld(pair(f"{name}/fp16", "reports_gemma3-270m")) for name in ("tq3_0:plain", "tq3")}
    own = rows * nbytes("tq3", "tq3", normalized=True) / 2**20
    return [
        Row(
            "blocks of 32 in 14 bytes",
            "3.5 bits: 4.57 times less",
            REACHED,
            f"`tq3_0`: {pair('tq3_0/tq3_0')['ratio']:.2f}; our `tq3` {pair('tq3/tq3')['ratio']:.2f} (plain keys)",
            _PAIRS,
        ),
        Row(
            "perplexity, keys and values",
            "+7.6 %, Llama-3.3-70B",
            SMALL,
            f"`tq3_0` {change(pair('tq3_0/tq3_0'))}, `tq3` {change(pair('tq3/tq3'))}; the embedded model",
            _PAIRS,
        ),
        Row(
            "the same on real models",
            "as above",
            NOT_MEASURED,
            f"as perplexity. KLD of `tq3` {on_real_models('tq3/tq3', 'kld')}, the same next token: "
            f"{on_real_models('tq3/tq3', 'top1')}",
            _PROFILES,
        ),
        Row(
            "perplexity, keys alone",
            "+6.6 %, 1.64 times less",
            SMALL,
            f"`tq3` keys {change(keys)}, {keys['ratio']:.2f} times less; the embedded model. Of `tq3_0` keys the KLD "
            f"alone: {real['tq3_0']}, plain `tq3` {real['tq3']} (SmolLM2-135M); {gemma['tq3_0:plain']}, normalized "
            f"`tq3` {gemma['tq3']} (Gemma 3 270M)",
            f"{_WITH_KERNELS}; {_REAL}",
        ),
        Row(
            "divergence of the format",
            "no figure",
            BUILT,
            f"KLD `tq3_0` {kld(pair('tq3_0/tq3_0'))}, `tq3` with fewer bytes {kld(pair('tq3/tq3'))}",
            _PAIRS,
        ),
        Row(
            "queries rotated inside the dot product",
            "built, for keys",
            BUILT,
            "for keys and values of `tq` formats; `tq3_0` itself is decoded",
            _KERNELS,
        ),
        Row(
            "attention that needs no square of the length",
            "by decoding first",
            BUILT,
            "for `tq` formats without decoding; prompts decode a layer at a time",
            _KERNELS,
        ),
        Row("one kernel that rotates and attends", "planned", BUILT, "`metal/attend.metal`", _KERNELS),
        Row("choice of the way by length", "planned", BUILT, "thresholds by chip, not tuned on any", _KERNELS),
        Row(
            "QJL residual",
            "planned, to lower the error",
            REFUTED,
            f"KLD with 4-bit values: tq35 keys {kld(pair('tq35/tq4'))}, tq3 keys with fewer bytes "
            f"{kld(pair('tq3/tq4'))}",
            _PAIRS,
        ),
        Row(
            "cache of 73,728 tokens, 80 layers, 8 KV heads",
            "5,040 MiB",
            REACHED,
            f"{own:,.0f} MiB by definition (`tq3` keys and values, all packed)",
            FORMATS,
        ),
        Row("longest context on two RTX 3090", "about 80K; 16K with 16 bits", NOT_MEASURED, "-"),
        Row("tok/s", "17.1 with 16 bits; 15.9, 9.0, 5.1 in the three phases", NOT_MEASURED, "on a GPU"),
        Row("prompt, tok/s", "66.3 with q8_0, 29.2 with tq3_0 keys", NOT_MEASURED, "on a GPU"),
        Row(
            "several GPUs",
            "two",
            BUILT,
            "several processes by `mlx.launch`, each with its heads and their cache; tried on one machine's CPU",
            "[Two Macs](../guides/two_macs.md)",
        ),
        Row("squared error of 3 bits", "at most 0.03, of the paper", NOT_REACHED, _error_of("tq3"), _WITH_KERNELS),
        Row("values stored row by row; CPU fallback", "built", BUILT, "the same", "[One token](../how/one_token.md)"),
    ]


def _error_of(name: str) -> str:
    found = pair(f"{name}/{name}", "formats")["key_error"]
    return f"{found:.4f} on keys of the embedded model; the scale is not that of the least error"


def tbq4_0() -> list[Row]:
    """TBQ4_0 for llama.cpp on a DGX Spark."""
    wide = get_format("tbq3_0").bytes_per_vector(256)
    mixed, ours = (
        {name: kld(pair(name, "reports_gemma3-270m")) for name in names}
        for names in (
            ("q8_0:plain/tbq4_0", "tbq4_0:plain/q8_0", "tbq4_0:plain/tbq3_0"),
            ("q8:plain/tq4", "tq4/q8", "tq4/tq3"),
        )
    )
    return [
        Row(
            "block of 128: 4-bit codes and an fp16 norm",
            "66 bytes, 4.125 bits",
            REACHED,
            f"`tbq4_0` {nbytes('tbq4_0')}, `tq4` {nbytes('tq4')} bytes",
            FORMATS,
        ),
        Row(
            "perplexity of tbq4_0",
            "+0.87 %, Llama-3.1-8B",
            SMALL,
            f"`tbq4_0` {change(pair('tbq4_0/tbq4_0'))}, `tq4` {change(pair('tq4/tq4'))}; the embedded model",
            _PAIRS,
        ),
        Row(
            "the same on real models",
            "as above",
            NOT_MEASURED,
            f"as perplexity. KLD of `tq4` {on_real_models('small', 'kld')}, the same next token: "
            f"{on_real_models('small', 'top1')}",
            _PROFILES,
        ),
        Row(
            "divergence of the format",
            "no figure",
            BUILT,
            f"KLD `tbq4_0` {kld(pair('tbq4_0/tbq4_0'))}, `tq4` with the same bytes {kld(pair('tq4/tq4'))}",
            _PAIRS,
        ),
        Row("q4_0 for comparison", "4.5 bits, +2.05 %", NOT_BUILT, "no such format"),
        Row(
            "q8_0 keys, turbo3 values",
            "+0.36 %",
            SMALL,
            f"q8/tq3 {change(pair('q8/tq3'))}, q8/tq3_0 {change(pair('q8/tq3_0'))}; the embedded model",
            _PAIRS,
        ),
        Row("q8_0", "8.5 bits, about 0 %", SMALL, f"`q8_0` {change(pair('q8_0/q8_0'))}; the embedded model", _PAIRS),
        Row(
            "TBQ3_0",
            "3.06 bits in blocks of 256; +0.81 % with q8_0 keys, +7.01 % alone",
            NOT_REACHED,
            f"{wide} bytes for 256 values, {8 * wide / 256:.3f} bits, in blocks of 128; alone "
            f"{change(pair('tbq3_0/tbq3_0'))}, on the embedded model; with q8_0 keys not measured",
            _PAIRS,
        ),
        Row("TBQ3_0 on a GPU", "planned", NOT_BUILT, "`tbq` formats are decoded; `tq3` has kernels", _KERNELS),
        Row(
            "queries and output rotated once, levels looked up",
            "CUDA kernel, 128 values a head, tbq4_0 for both",
            BUILT,
            "for `tq` formats of 64, 80, 128, 256; levels are computed",
            _KERNELS,
        ),
        Row(
            "different formats of keys and values",
            "q8_0/turbo3 and tbq4_0/tbq4_0; q8_0/tbq4_0, tbq4_0/q8_0, tbq4_0/tbq3_0 (about +2 to 3 %) planned",
            BUILT,
            f"any pair. KLD of the three planned {', '.join(mixed.values())}; of q8/tq4 with plain, tq4/q8 and tq4/tq3 "
            f"with normalized keys {', '.join(ours.values())} (Gemma 3 270M)",
            _REAL,
        ),
        Row(
            "one fixed rotation for all devices",
            "made from a seed, kept in the code",
            BUILT,
            "another matrix, kept as data: blocks have the same layout, not the same codes",
            FORMATS,
        ),
        Row("prompt, tok/s", "about 1,400; 3,059 with 16 bits", NOT_MEASURED, "on a GPU"),
        Row("decoding, tok/s", "about 35; 43.65 with 16 bits", NOT_MEASURED, "on a GPU"),
        Row("matrix units for prompts", "planned", BUILT, "rows are decoded, then mlx's own attention", _KERNELS),
        Row(
            "turbo3 keys",
            "+5.12 %",
            SMALL,
            f"tq3/q8 {change(pair('tq3/q8', 'formats'))}; the embedded model",
            _WITH_KERNELS,
        ),
        Row("MiniMax M2.5 at 72K to 96K tokens, 65K with q4_0", "estimated", NOT_MEASURED, "-"),
    ]
