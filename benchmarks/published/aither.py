"""aither-kvcache, version 2.0.0: its codec and formats, then its serving."""

from collections.abc import Callable

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
    ratio,
)
from benchmarks.tables.markdown import Record, report

_PYTHON = "[Python](../reference/python.md)"
_ENCODED = "[One token](../how/one_token.md#encoded)"
_PAIRS = at("formats", "all-formats", "quality_all_formats.json")
_SPECTRAL = at("formats", "all-formats", "quality_spectral.json")
_ABLATION = at("codec", "rotations-blocks-means", "quality_ablation.json")
_ANSWERS = "[Answers](answers.md)"
_KERNELS = "[Kernels](../how/kernels.md)"
_STREAMS = at("speed", "the-server", "server_streams.json")
_DECODE = at("speed", "one-layer", "decode_attention.json")
_PROFILES = at("README", "three-models", "quality_profiles_smollm2.json", "quality_profiles_gemma3-270m.json")
_RECALL = "[Recall](recall.md); [recall.json](../../benchmarks/results/recall.json)"


def codec() -> list[Row]:
    """Levels, rotations, formats, spectral keys."""
    ablation = report("quality_ablation.json")["results"]
    wht, haar, three = (kld(ablation[f"{name}.4/fp16"]) for name in ("base", "Haar", "three rounds"))
    tq4, tq35 = pair("tq4/tq4"), pair("tq35/tq4")
    fewest, most, rich = (
        pair(name, "spectral")
        for name in ("spectral8/tq4", "spectral16_int8/tq4", "tq4+tq4+spectral14+tq4+tq4+tq4/tq4")
    )
    old = report("quality_mixed_long.json")["results"]
    return [
        Row(
            "Lloyd-Max levels and their solver",
            "tables of 1 to 4 bits",
            BUILT,
            "2 to 4 bits; levels are polynomials fitted to them, which a kernel computes",
            _ENCODED,
        ),
        Row(
            "rotation: Haar, or rounds of a randomised Hadamard transform",
            "both",
            BUILT,
            f"one round. KLD of 4-bit keys {wht}; with a Haar matrix {haar}, with three rounds {three}",
            _ABLATION,
        ),
        Row(
            "squared error over 4^-bits, at 4, 3, 2 bits",
            "2.39, 2.17, 1.86 on random vectors; at most 2.7",
            SMALL,
            f"{_over_bound()} on keys of the embedded model; the scale is not that of the least error",
            at("formats", "pairs-with-kernels", "quality_formats.json"),
        ),
        Row(
            "bytes of a vector of 128 at 4, 3, 2 bits",
            "68, 52, 36: 3.8, 4.9, 7.1 times less than fp16",
            REACHED,
            f"{_each(lambda name: str(nbytes(name)))}: with normalized keys {_each(lambda name: ratio(name, name))}",
            FORMATS,
        ),
        Row(
            "kernels that quantise and pack",
            "2 and 4 bits; 3 bits without; one launch to encode and store",
            BUILT,
            "2, 3, 4 and 8 bits; keys and values in one dispatch",
            _KERNELS,
        ),
        Row(
            "attention in rotated space over packed rows",
            "queries rotated once, the output once",
            BUILT,
            "the same, in one kernel or two; prompts decode a layer at a time",
            _KERNELS,
        ),
        Row(
            "copies of packed blocks for beam search",
            "by block",
            NOT_BUILT,
            "whole caches are copied packed; they have no blocks that several share",
        ),
        Row("the codec by itself, which checks its error", "built", BUILT, "`TurboQuant`, `validate`", _PYTHON),
        Row(
            "decoded vectors of one layer at a time, or of chosen blocks",
            "a buffer that all layers share",
            BUILT,
            "prompts decode a layer at a time; single tokens decode nothing",
            _KERNELS,
        ),
        Row("memory estimate", "of a model and a context", BUILT, "`memory_report`", _PYTHON),
        Row(
            "FP8: 2.0 times less, near exact",
            "no figure of quality",
            SMALL,
            f"{pair('fp8/fp8')['ratio']:.2f} times less, KLD {kld(pair('fp8/fp8'))}",
            _PAIRS,
        ),
        Row(
            "TQ35, TQ25: two widths and a QJL bit",
            "64 and 44 bytes: 4.0 and 5.8 times less",
            REACHED,
            f"{nbytes('tq35')} and {nbytes('tq25')} bytes",
            FORMATS,
        ),
        Row(
            "TQ35 is better than TQ4",
            "no figure of quality",
            REFUTED,
            f"KLD with 4-bit values: tq35 keys {kld(tq35)}, tq4 keys {kld(tq4)}",
            _PAIRS,
        ),
        Row(
            "energy of keys in few RoPE pairs",
            "12 of 64 pairs hold over 95 % in a typical layer of Qwen3.5",
            NOT_REACHED,
            f"16 pairs leave {100 * pair('spectral16/tq4', 'spectral')['key_error']:.0f} % of it out, on the embedded "
            "model; Qwen3.5 not measured",
            _SPECTRAL,
        ),
        Row(
            "TriAttention (spectral keys): bytes of F = 12 and 8 at 4 bits, 16 at 8",
            "26, 18, 50: 9.85, 14.2, 5.1 times less",
            REACHED,
            ", ".join(str(nbytes(name)) for name in ("spectral12", "spectral8", "spectral16_int8")) + ", keys alone",
            FORMATS,
        ),
        Row(
            "quality of spectral keys",
            "from high (F = 16, 8 bits) to acceptable (F = 8, 4 bits); no figure",
            NOT_REACHED,
            f"perplexity {change(most)} and {change(fewest)}; needles {most['found']} and {fewest['found']} of "
            f"{most['asked']}; F = 12 not measured",
            _SPECTRAL,
        ),
        Row(
            "scores from the coefficients, without decoding",
            "5 to 10 times fewer operations",
            NOT_BUILT,
            "spectral keys are decoded first",
        ),
        Row(
            "spectral profiles of seven Qwen3.5 models",
            "F = 10 to 16: 11.6 to 7.5 times less",
            NOT_BUILT,
            "none is in the package",
        ),
        Row(
            "frequencies by layer",
            "fewer in early layers",
            BUILT,
            "`mlx_tq.evaluate spectrum` finds schedules from a model's keys; the richest makes one layer of six "
            f"spectral: KLD {kld(rich)}",
            _SPECTRAL,
        ),
        Row(
            "packed recent and spectral old keys in one cache",
            "planned",
            BUILT,
            f"does not pay: KLD {kld(old['tq4~spectral16/tq4'])}, of tq4 alone {kld(old['tq4/tq4'])}",
            at("formats", "two-formats-of-keys", "quality_mixed_long.json"),
        ),
        Row("GPU kernels, tiers and graphs for spectral keys", "planned", NOT_BUILT, "decoded by mlx's operations"),
    ]


def serving() -> list[Row]:
    """Kernels, vLLM, tiers, the graph of blocks, throughput."""
    served = {(f["profile"], f["streams"], f["prefix"]): f for f in report("server_streams.json")["figures"]}
    streams = {key[:2]: f["tokens_per_second"] for key, f in served.items() if key[2] == "hot"}
    cold, hot = (served["small", 1, sinks]["seconds"] for sinks in ("cold", "hot"))
    token = 36 * 8 * nbytes("tq4", "tq4", normalized=True)
    looks = report("recall.json")["rows"]
    return [
        Row(
            "fused decode against its reference",
            "cosine 1.000000, greatest difference 0.000122",
            BUILT,
            "kernels are tested against their twins on a simulator; no cosine was recorded",
            _KERNELS,
        ),
        Row("split-K", "27 times faster at 16K", NOT_MEASURED, "blocks of tokens, then a merge", _KERNELS),
        Row(
            "decode attention of 36 layers",
            "19.6 ms at 4K, RTX 5090 (8K and 16K read no more blocks)",
            NOT_MEASURED,
            "no time on a GPU; on two CPU cores and at 8,192 tokens a layer with `small` is "
            f"{one_layer('float32', 8192):.1f} times as fast as mlx's own in float32 and "
            f"{one_layer('bfloat16', 8192):.1f} in bf16, which mlx computes slowly there",
            _DECODE,
        ),
        Row(
            "memory of 16K tokens, 36 layers, 8 KV heads",
            "612 MiB at 4 bits",
            REACHED,
            f"{16384 * token / 2**20:.0f} MiB by definition (`small`, all packed)",
            FORMATS,
        ),
        Row(
            "tokens in 20 GiB, the same shape",
            "548,275 at 4 bits, 291,271 in FP8: 13.4 and 7.1 sequences of 40K",
            REACHED,
            f"{20 * 2**30 // token:,}, {20 * 2**30 / token / 40960:.1f} sequences, by definition (`small`, all packed)",
            FORMATS,
        ),
        Row(
            "page of 16 tokens, 8 KV heads",
            "17,408 bytes at 4 bits; 32,768 in FP8, 65,536 in 16 bits",
            REACHED,
            f"{16 * token // 36:,} bytes by definition (`small`); pages there are none",
            FORMATS,
        ),
        Row(
            "tokens in 128 GB of system memory, the same shape",
            "3.9 million, 34 KB each",
            NOT_REACHED,
            f"{128 * 2**30 / token / 1e6:.2f} million by definition; the published 612 MiB for 16K are 39 KB each, and "
            f"give {128 * 2**30 / (612 * 2**20 / 16384) / 1e6:.2f}",
            FORMATS,
        ),
        Row(
            "vLLM: page sizes, import hooks, backend, plugin, upstream backend",
            "built; 118,112 tokens in FP8 become 222,336, later 309K and 329K (TQ35)",
            NOT_BUILT,
            "mlx-lm instead: `mlx_tq.compressed`, and a server",
        ),
        Row(
            "shadow mode: an FP8 cache, and a packed copy beside it",
            "built",
            BUILT,
            "`--kv-shadow`: the model's own cache answers, and what the compressed one would have changed is reported",
            "[Save memory](../guides/save_memory.md)",
        ),
        Row(
            "primary mode: the packed cache alone",
            "built; fused for TQ4, for TQ35 decoded (v0.8.1), fused later",
            BUILT,
            "the only way; formats without kernels are decoded",
            _KERNELS,
        ),
        Row(
            "torch.compile, CUDA graphs, custom operations",
            "26.1 to 64.0 tok/s at 5 streams; 144 graph breaks a token, then none: 11 to 40 tok/s at one",
            NOT_BUILT,
            "a step compiles with `mx.compile`, which gains nothing",
            _KERNELS,
        ),
        Row(
            "1, 5, 20 streams on an RTX 5090, 8B weights",
            "median 37.8, 174.8, 589 tok/s (v1.3); 224.1, 288.6 and 115.2 at 5, 10 and 20 (v0.8); 23.6 and 120 at "
            "1 and 5 (v1.0)",
            NOT_REACHED,
            f"{', '.join(str(streams['small', count]) for count in (1, 5, 20))} tok/s on two CPU cores with 7 million "
            f"weights: 20 streams give {streams['small', 20] / streams['small', 1]:.1f} times one's, there 15.6",
            _STREAMS,
        ),
        Row(
            "20 streams without an error",
            "no error",
            SMALL,
            f"all {served['small', 20, 'hot']['answer_tokens']} tokens of 20 answers came; the embedded model",
            _STREAMS,
        ),
        Row(
            "packed is faster than uncompressed when serving",
            "above FP8's 120 to 150 tok/s at 5 streams",
            NOT_REACHED,
            f"at 5 streams {streams['small', 5] / streams['off', 5]:.2f}, at 20 "
            f"{streams['small', 20] / streams['off', 20]:.2f} times the tokens of fp16",
            _STREAMS,
        ),
        Row(
            "GSM8K, 200 questions",
            "84.5 %, read from behind the model's thoughts",
            NOT_MEASURED,
            "`mlx_tq.evaluate reasoning` takes its file, and leaves thoughts out; no model here answers it",
            _ANSWERS,
        ),
        Row(
            "4 bits answer as FP8 does",
            "the same traces on GSM8K",
            NOT_REACHED,
            f"the same next token as fp16: {on_real_models('small', 'top1')}, sinks and window in 16 bits",
            _PROFILES,
        ),
        Row(
            "tool calls",
            "10 of 10",
            NOT_MEASURED,
            "`mlx_tq.evaluate tools`, with 33 cases; no model here is made for calls. The server takes tools",
            _ANSWERS,
        ),
        Row(
            "a sinks that was read before",
            "12 to 17 % faster, one request",
            SMALL,
            f"an answer behind 2,048 tokens that were read takes {hot:.1f} s, behind 256 that were not {cold:.1f}; bit "
            "for bit the same, also on disk; the embedded model",
            _STREAMS,
        ),
        Row(
            "cold tier in system memory behind an FP8 or a 4-bit one",
            "1,072 MB/s for 16K tokens, 135 for 1K",
            BUILT,
            _warmed(),
            at("store", "tiers", "store_tiers.json"),
        ),
        Row(
            "chosen blocks come back",
            "built; no figure of quality",
            BUILT,
            f"of {len(looks)} questions {sum(row['returned'] == 1 for row in looks)} had the whole code back; answered "
            f"{_sum(looks, 'recall')}, without it {_sum(looks, 'evicted')}, with a full cache {_sum(looks, 'full')} "
            "(SmolLM2-135M, about 1,100 tokens)",
            _RECALL,
        ),
        Row(
            "copies leave in the background",
            "a thread, no synchronisation",
            BUILT,
            "a thread writes; what the disk does not take is counted",
            "[Rounds](../how/rounds.md#recall)",
        ),
        Row("recompute what no tier has", "third tier", BUILT, "a prompt that no store has is read"),
        Row(
            "KVCacheGraph: five kinds of edges, eviction, prefetch",
            "in production; no figure",
            NOT_REACHED,
            _graph(),
            at("store", "what-leaves", "store_graph.json"),
        ),
        Row(
            "GraphEvictionAdvisor",
            "ranks every 500 ms in under 50 ms",
            NOT_BUILT,
            "measured with the graph, which is no gain",
            at("store", "what-leaves", "store_graph.json"),
        ),
        Row(
            "blocks shared by requests, known by edges of the graph",
            "built",
            BUILT,
            _shared(),
            at("store", "requests-with-one-beginning", "store_shared.json"),
        ),
        Row(
            "a 14B model on a rented RTX 3090, set up by a script",
            "context 8,192 to 32,768; 126,240 tokens",
            NOT_BUILT,
            "no such set-up, and no model of that size was run",
        ),
        Row("package on PyPI", "2.0.0", NOT_BUILT, "not released"),
    ]


def _each(show: Callable[[str], str]) -> str:
    """A figure for 4, 3 and 2 bits."""
    return ", ".join(map(show, ("tq4", "tq3", "tq2")))


def _over_bound() -> str:
    errors = {bits: pair(f"tq{bits}/tq{bits}", "formats")["key_error"] for bits in (4, 3, 2)}
    return ", ".join(f"{error * 4**bits:.2f}" for bits, error in errors.items())


def _sum(rows: list[Record], field: str) -> str:
    return str(sum(bool(row[field]) for row in rows))


def _warmed() -> str:
    """How fast rows come back from a file."""
    found = report("store_tiers.json")["figures"][-1]
    speeds = {name: found["nbytes"] / found[name]["warm"] / 1e6 for name in ("archive", "store", "plain")}
    return (
        f"a file, out of the page cache: {speeds['archive']:.0f} MB/s from the archive, {speeds['store']:.0f} from the "
        f"store for 16K tokens of that shape; a plain file {speeds['plain']:.0f}"
    )


def _graph() -> str:
    """Tokens read again beside least recently used."""
    figures = report("store_graph.json")["figures"]
    usual = {(f["trace"], f["share"]): f["read_again"] for f in figures if f["policy"] == "least recently used"}
    found = [f for f in figures if f["policy"] == "graph and recency" and usual[f["trace"], f["share"]]]
    more = [100 * (f["read_again"] / usual[f["trace"], f["share"]] - 1) for f in found]
    return f"{min(more):+.0f} to {max(more):+.0f} % of tokens read again beside least recently used: studied, not built"


def _shared() -> str:
    """What requests hold together."""
    found = report("store_shared.json")["figures"][-1]
    return (
        f"known by a digest of what was read; {found['requests']} requests with 4,000 tokens in common hold "
        f"{100 * found['shared']['held'] / found['own']['held']:.0f} % of the bytes"
    )
