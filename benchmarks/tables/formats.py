"""Formats and profiles as the package has them: what each takes by definition, and what its profiles cost."""

from benchmarks.tables.markdown import Record, lines, machine, report
from mlx_tq.codec.formats import CodecOptions, Format, format_names, get_format
from mlx_tq.codec.normalization import MEAN_TOKENS
from mlx_tq.config import DEFAULT_PROFILE, PROFILES, KVConfig
from mlx_tq.errors import ConfigError

MODELS = {"embedded": "embedded", "smollm2": "SmolLM2-135M", "gemma3-270m": "Gemma 3 270M"}
HEAD_DIMS = (64, 80, 128, 256)
PURPOSE = {
    "off": "mlx-lm's own cache",
    "safe": "when in doubt",
    "balanced": "every day",
    "small": "a longer context",
    "tiny": "what fits in no other way",
    "long": "half of the tokens leave, and come back where they are asked for",
}


def _bytes(found: Format, head_dim: int) -> str:
    try:
        found.check(head_dim)
    except ConfigError:
        return "-"
    return str(found.bytes_per_vector(head_dim))


def storage() -> str:
    """A row for each format, most bits first: bytes a vector by head size, what it stores, what attends to it."""
    rows = []
    for name in format_names():
        found = get_format(name)
        sizes = [_bytes(found, dim) for dim in HEAD_DIMS]
        reads = "kernels" if found.codec(128, CodecOptions()).has_kernels else "decodes"
        rows.append([f"`{name}`", *sizes, "keys" if found.keys_only else "keys, values", reads])
    return lines(["format", *(f"D = {dim}" for dim in HEAD_DIMS), "for", "attention"], rows)


def profiles() -> str:
    """A row for each profile: formats, bytes at D = 128 with means, and top-1 on every model that was measured."""
    measured = [_by_pair(report(f"quality_profiles_{model}.json")["results"]) for model in MODELS]
    rows = []
    for name, config in PROFILES.items():
        nbytes = sum(get_format(each).bytes_per_vector(128) for each in (config.key, config.value))
        if config.normalize and not config.is_off:
            nbytes += 2 * 128 // MEAN_TOKENS
        tops = [_top1(config, found) for found in measured]
        shown = f"`{name}`" + (" (default)" if name == DEFAULT_PROFILE else "")
        rows.append([shown, config.key, config.value, str(nbytes), *tops, PURPOSE[name]])
    columns = ["`--kv-profile`", "keys", "values", "bytes a token and KV head (D = 128)"]
    return lines([*columns, *(f"top-1: {model}" for model in MODELS.values()), "for"], rows)


def quality() -> str:
    """KL divergence and top-1 of each pair of a profile on every model."""
    reports = {model: report(f"quality_profiles_{model}.json") for model in MODELS}
    found = [_by_pair(each["results"]) for each in reports.values()]
    rows = [
        [
            pair,
            *(
                text
                for each in found
                for text in (f"{each[pair]['kld']:.6f} ± {each[pair]['kld_error']:.6f}", f"{each[pair]['top1']:.1f}")
            ),
        ]
        for pair in found[0]
    ]
    columns = ["cache", *(f"{name}: {what}" for name in MODELS.values() for what in ("KLD", "top-1 %"))]
    files = ", ".join(f"[{name}](../../benchmarks/results/quality_profiles_{name}.json)" for name in MODELS)
    command = (
        "python -m mlx_tq evaluate divergence --profiles safe,balanced,small,tq3/tq3,tq4/tq3,tq4/tcq3 \\\n"
        "    --dtype float32 --length 2048 --chunks N [--model M] --text wiki.test.raw"
    )
    about = f"*{machine(reports['embedded'])}; {files}.*"
    return "\n".join(["```", command, "```", "", about, "", lines(columns, rows)])


def _top1(config: KVConfig, found: Record) -> str:
    """Of a profile, which was measured without eviction."""
    if config.is_off:
        return "100.0 %"
    return "-" if config.evict is not None else f"{found[_pair(config)]['top1']:.1f} %"


def _pair(config: KVConfig) -> str:
    return f"{config.key}/{config.value}"


def _by_pair(results: Record) -> Record:
    """Results by their formats, those of the fp16 cache left out."""
    pairs = {_pair(PROFILES[name]) if name in PROFILES else name: found for name, found in results.items()}
    return {pair: found for pair, found in pairs.items() if pair != _pair(PROFILES["off"])}


TABLES = {"storage": storage, "profiles": profiles, "profiles_quality": quality}
