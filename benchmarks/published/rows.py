"""What a row of docs/measurements/published.md says, and where its figures come from.

What a report published is written in the rows; every figure of ours is looked up in benchmarks/results or computed from
the formats of the package, so a row changes when they do.
"""

from typing import NamedTuple

from benchmarks.tables.eviction import HYBRID, ONCE, SMOLLM2, SWEEP, TEXT, find
from benchmarks.tables.markdown import Record, report
from mlx_tq.codec.formats import get_format
from mlx_tq.codec.normalization import MEAN_TOKENS

REACHED, SMALL, NOT_REACHED, REFUTED = "reached", "reached, small model", "not reached", "refuted"
BUILT, NOT_MEASURED, NOT_BUILT = "built", "not measured", "not built"
MEASURED = (REACHED, SMALL, NOT_REACHED, REFUTED)
VERDICTS = (*MEASURED, BUILT, NOT_MEASURED, NOT_BUILT)
_REAL = {"smollm2": "SmolLM2-135M", "gemma3-270m": "Gemma 3 270M"}
# Bytes by definition.
FORMATS = "[Formats](../reference/formats.md)"


class Row(NamedTuple):
    """A feature or figure of a report. ours: what stands beside it. where: links to pages and files."""

    what: str
    published: str
    verdict: str
    ours: str
    where: str = "-"


def at(page: str, part: str, *files: str) -> str:
    """A section of a page of the measurements, above whose table the command stands, and the files that it shows."""
    names = ", ".join(f"[{name}](../../benchmarks/results/{name})" for name in files)
    label = (part.replace("-", " ") if page == "README" else page).capitalize()
    return f"[{label}]({page}.md#{part})" + (f"; {names}" if names else "")


def pair(name: str, source: str = "all_formats") -> Record:
    """What a pair of formats costs on the embedded model."""
    found: Record = report(f"quality_{source}.json")["results"][name]
    return found


def change(found: Record) -> str:
    """Of perplexity against the fp16 cache."""
    return f"{found['delta']:+.2f} ± {found['delta_error']:.2f} %"


def kld(found: Record) -> str:
    """Divergence from the fp16 cache, in nats."""
    return f"{found['kld']:.5f} ± {found['kld_error']:.5f}"


def nbytes(key: str, value: str = "", *, normalized: bool = False) -> int:
    """Of a packed vector of 128, or of a key and a value, with the key's share of a mean where it is normalized."""
    names = [key, value] if value else [key]
    return sum(get_format(name).bytes_per_vector(128) for name in names) + normalized * 2 * 128 // MEAN_TOKENS


def ratio(key: str, value: str, *, normalized: bool = True) -> str:
    """Of fp16's bytes to a packed token's."""
    return f"{512 / nbytes(key, value, normalized=normalized):.2f}"


def on_real_models(name: str, what: str) -> str:
    """The KLD ("kld") or top-1 ("top1") of a profile or pair with normalized keys, on the two real models."""
    found = {label: report(f"quality_profiles_{model}.json")["results"][name] for model, label in _REAL.items()}
    return ", ".join(f"{kld(r) if what == 'kld' else f'{r[what]:.1f} %'} ({label})" for label, r in found.items())


def one_layer(dtype: str, tokens: int) -> float:
    """How many times faster a layer attends to `small` than mlx to vectors of the type itself."""
    timings = report("decode_attention.json")["timings"]
    median = {t["arm"]: t["median"] for t in timings if (t["dtype"], t["tokens"]) == (dtype, tokens)}
    return float(median["fp16"] / median["small"])


def text(variant: str, share: float, **fields: object) -> str:
    """Change of perplexity over a text whose tokens leave while it is read."""
    (found,) = find(SWEEP, {**TEXT, "variant": variant, "retention": share, **fields})
    return f"{found['delta']:+.1f} ± {found['delta_error']:.1f} %"


def answers(variant: str, share: float, **fields: object) -> str:
    """Needle tokens alive, and answers found, after one round."""
    return _needles(find(SWEEP, {**ONCE, "variant": variant, "retention": share, **fields}))


def smollm2(variant: str, share: float) -> str:
    """The same on SmolLM2."""
    return _needles(find(SMOLLM2, {"variant": variant, "retention": share, "kind": "multi", "length": 1000}))


def smollm2_text(variant: str, share: float) -> str:
    """Change of perplexity on SmolLM2."""
    (found,) = find(SMOLLM2, {"text": "2 x 1000", "variant": variant, "retention": share})
    return f"{found['delta']:+.1f} ± {found['delta_error']:.1f} %"


def hybrid(variant: str, share: float, block: int = 1) -> str:
    """The same on the hybrid, where so many tokens leave together."""
    return _needles(find(HYBRID, {"variant": variant, "retention": share, "granularity": block}))


def _needles(found: list[Record]) -> str:
    alive = 100 * sum(r["live"] / (r["needle"][1] - r["needle"][0]) for r in found) / len(found)
    verdicts = [r["verdict"] for r in found]
    return f"{verdicts.count('PASS')} of {len(verdicts) - verdicts.count('VOID')} ({alive:.0f} % of tokens alive)"
