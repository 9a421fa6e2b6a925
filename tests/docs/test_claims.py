"""What README and guides claim in their prose is what the JSON of the measurements says."""

import re
from statistics import mean

import pytest

from benchmarks.tables.markdown import report
from benchmarks.tables.pages import PLACE
from mlx_tq.codec.normalization import MEAN_TOKENS
from mlx_tq.codec.formats import get_format
from mlx_tq.config import PROFILES

from .pages import GUIDES, README, name, without_blocks

DEFAULT = "triattention:granularity=32"
GUIDE = {page.name: page for page in GUIDES}


def top1_where_packed():
    return [
        report(f"quality_normalized_{model}.json")["results"]["tq4/tq4"]["top1"]
        for model in ("smollm2", "gemma3-270m")
    ]


def readme_top1():
    return "agree on {:.1f} and {:.1f} % of tokens on the two real ones".format(*top1_where_packed())


def guide_top1():
    return "token in {:.1f} % of cases on SmolLM2 and {:.1f} % on Gemma 3".format(*top1_where_packed())


def bytes_of_small():
    config = PROFILES["small"]
    sizes = [get_format(each).bytes_per_vector(128) for each in (config.key, config.value)]
    return f"takes {sum(sizes) + 2 * 128 // MEAN_TOKENS} bytes a KV head instead of {2 * 2 * 128}"


def alive(variant, retention, source):
    found = report(source)["results"].values()
    rows = [r for r in found if r.get("variant") == variant and r["retention"] == retention and "live" in r]
    return 100 * mean(r["live"] / (r["needle"][1] - r["needle"][0]) for r in rows)


def default_against_chance():
    """In the same blocks, and more than token by token by what was asked for."""
    gains = []
    for source in ("evict_modes_smollm2.json", "evict_modes_smollm2_2000.json"):
        for share, least in ((90, 8), (75, 10)):
            kept = alive(DEFAULT, share, source)
            assert kept - alive("random", share, source) >= least
            gains.append(kept - alive("random:granularity=32", share, source))
    said = "The default keeps {:.0f} and {:.0f} points more of a fact than chance at 90 and 75 % of 1,000 tokens, and "
    return (said + "over 2,000 tokens {:.0f} and {:.0f}").format(*gains)


def default_on_text():
    for source in ("evict_modes_text_smollm2.json", "evict_modes_text_smollm2_2000.json"):
        rows = {(r["variant"], r["retention"]): r["delta"] for r in report(source)["results"].values()}
        for share in (90, 75, 50):
            assert rows[DEFAULT, share] < min(rows["random", share], rows["random:granularity=32", share])
    return "loses less of the text than chance does at every share"


def blocks_keep_answers():
    found = report("evict_modes_smollm2.json")["results"].values()
    said = []
    for variant in (DEFAULT, "triattention"):
        rows = [r["verdict"] for r in found if (r.get("variant"), r.get("retention")) == (variant, 75)]
        said.append((rows.count("PASS"), len(rows) - rows.count("VOID")))
    (blocks, asked), (single, again) = said
    assert asked == again
    return f"{blocks} of {asked} answers stay at 75 %, and {single} with single tokens"


def whose_queries():
    own, alone = (alive(each, 50, "evict_sweep_smollm2.json") for each in (DEFAULT, f"{DEFAULT}:stats=text"))
    return (
        f"the default keeps {own:.0f} % of a fact in another run, and {alone:.0f} % where it learns from the text alone"
    )


def text_of_long():
    rises = [report(f"recall_text_{model}.json")["results"]["off@50%"]["delta"] for model in ("smollm2", "embedded")]
    return "perplexity of text is {:.1f} % higher on SmolLM2 and {:.1f} % on the embedded model".format(*rises)


def profiles_above_98():
    found = [report(f"quality_profiles_{model}.json")["results"] for model in ("embedded", "smollm2", "gemma3-270m")]
    tiny = f"{PROFILES['tiny'].key}/{PROFILES['tiny'].value}"
    assert all(each[name]["top1"] >= 98 for each in found for name in ("safe", "balanced", "small", tiny))
    tops = [each["tq3/tq3"]["top1"] for each in found[1:]]
    least = "All are at or above 98 %; 3-bit keys and values, , are at {:.1f} and {:.1f} % on the two real models"
    return least.format(*tops)


def ratio(source, own, other):
    results = report(source)["results"]
    return results[own]["kld"] / results[other]["kld"]


def formats_by_layer():
    pairs = (("4.33bits", "tq4/tq4"), ("3.33bits", "tq3/tq3"))
    smollm2 = [ratio("by_layer_smollm2.json", *pair) for pair in pairs]
    pairs = (("4.21bits", "tq4/tq4"), ("3.21bits", "tq3/tq3"))
    embedded = [ratio("by_layer_embedded.json", *pair) for pair in pairs]
    assert [*smollm2, *embedded] == pytest.approx([4 / 5, 2 / 5, 1 / 9, 1 / 8], rel=0.05)
    return (
        "on SmolLM2 is four fifths of that of at its bits and two fifths of that of at its; "
        "on the embedded model a ninth and an eighth"
    )


def trellis_codes():
    models = ("embedded", "smollm2", "gemma3-270m")
    found = [ratio(f"trellis_divergence_{model}.json", "tcq3/tcq3", "tq3/tq3") for model in models]
    assert found == pytest.approx([3 / 5] * 3, rel=0.06)
    return "are trellis codes: two fifths less is lost, and prompts are read slower"


CLAIMS = [
    (README, readme_top1),
    (GUIDE["save_memory.md"], guide_top1),
    (GUIDE["save_memory.md"], text_of_long),
    (GUIDE["save_memory.md"], profiles_above_98),
    (GUIDE["save_memory.md"], formats_by_layer),
    (GUIDE["save_memory.md"], trellis_codes),
    (GUIDE["save_memory.md"], bytes_of_small),
    (GUIDE["evict.md"], default_against_chance),
    (GUIDE["evict.md"], default_on_text),
    (GUIDE["evict.md"], blocks_keep_answers),
    (GUIDE["evict.md"], whose_queries),
]


def prose(page):
    """A page without blocks, tables and names of code, in one line."""
    return " ".join(re.sub(r"`[^`\n]*`", "", PLACE.sub("", without_blocks(page))).split())


@pytest.mark.parametrize(("page", "claim"), CLAIMS, ids=lambda each: getattr(each, "__name__", None))
def test_a_claim_is_what_was_measured(page, claim):
    assert claim() in prose(page)


def test_no_share_or_factor_is_claimed_without_its_measurement():
    for page in (README, *GUIDES):
        left = prose(page)
        for where, claim in CLAIMS:
            left = left.replace(claim(), "") if where == page else left
        assert re.findall(r"\d[\d.,]* (?:%|times\b).{0,30}", left) == [], name(page)
