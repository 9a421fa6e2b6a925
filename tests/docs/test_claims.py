"""What README and guides claim in their prose is what the JSON of the measurements says."""

import re
from statistics import mean

import pytest

from benchmarks.tables.markdown import report
from benchmarks.tables.pages import PLACE
from mlx_tq.codec.conditioning import MEAN_TOKENS
from mlx_tq.codec.formats import get_format
from mlx_tq.config import PROFILES

from .pages import GUIDES, README, name, without_blocks

SHARES, QUARTER = "evict_shares_smollm2.json", "triattention:stats=text25.safetensors"
GUIDE = {page.name: page for page in GUIDES}


def top1_where_packed():
    return [
        report(f"quality_conditioned_{model}.json")["results"]["tq4/tq4"]["top1"]
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


def ramp():
    """Verdicts with and without rescue, of needles in a cache that evicts: [(tokens alive, tokens, without, with)]."""
    cells = report("rescue_ramp.json")["cells"].values()
    arms = [
        {
            tuple(cell[field] for field in ("budget", "rung", "depth", "seed")): cell
            for cell in cells
            if cell["arm"] == arm
        }
        for arm in ("evict", "rescue")
    ]
    return [
        (cell["live"], cell["needle"][1] - cell["needle"][0], cell["verdict"], arms[1][key]["verdict"])
        for key, cell in arms[0].items()
    ]


def facts_that_left():
    gone = [(without, with_) for live, _, without, with_ in ramp() if not live]
    assert all(with_ == "PASS" != without for without, with_ in gone)
    return f"all {len(gone)} facts that had left the cache whole were answered with rescue, none without"


def facts_cut_in_two():
    missed = [with_ for live, size, without, with_ in ramp() if 0 < live < size and without != "PASS"]
    assert (missed.count("PASS"), len(missed)) == (1, 5)
    return "a fact cut in two by eviction was found in one case of five"


def alive(variant, retention, source="quality_sweep_smollm2.json"):
    found = report(source)["results"].values()
    rows = [r for r in found if r.get("variant") == variant and r["retention"] == retention and "live" in r]
    return mean(r["live"] / (r["needle"][1] - r["needle"][0]) for r in rows)


def text_alone_is_worse_than_chance():
    shares = (90, 75, 50)
    assert all(alive("triattention:stats=text", share) < alive("random", share) for share in shares)
    return "A run that learns from text alone keeps less of a fact than chance does"


def default_against_chance():
    gains = [100 * (alive(QUARTER, share, SHARES) - alive("random", share, SHARES)) for share in (90, 75)]
    assert gains[0] >= 8
    assert gains[1] >= 10
    return "The default keeps {:.0f} and {:.0f} points more of a fact than chance at 90 and 75 %".format(*gains)


def default_on_text():
    rows = {(r["variant"], r["retention"]): r for r in report(SHARES)["results"].values() if "delta" in r}
    quarter, chance = ([rows[name, share]["delta"] for share in (90, 75)] for name in (QUARTER, "random"))
    assert all(own <= other for own, other in zip(quarter, chance, strict=True))
    return "loses no more of the text than chance does"


CLAIMS = [
    (README, readme_top1),
    (GUIDE["save_memory.md"], guide_top1),
    (GUIDE["save_memory.md"], bytes_of_small),
    (GUIDE["chat.md"], facts_that_left),
    (GUIDE["chat.md"], facts_cut_in_two),
    (GUIDE["evict.md"], text_alone_is_worse_than_chance),
    (GUIDE["evict.md"], default_against_chance),
    (GUIDE["evict.md"], default_on_text),
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
