"""Every flag of mlx_lm.generate means here what it means there."""

import pytest
from mlx_lm import generate, load
from mlx_lm.sample_utils import make_logits_processors

from .tools import EMBEDDED, copy_model, facts, float32_model

PROSE = "The history of the city began in the year"
TEXT, QUESTION = facts(3)
FREE = ("--ignore-chat-template", "-p", PROSE, "-m", 16)
SAMPLED = ("--temp", "1.0", "--seed", "7")
HOT = ("--temp", "1.5", "--seed", "3")

CASES = {
    "chat": ("-p", TEXT + QUESTION, "-m", 20),
    "long option": ("--prompt", TEXT + QUESTION, "--max-tokens", 20),
    "escapes": ("-p", r"One.\n\tTwo.\n" + QUESTION, "-m", 12),
    "plain": FREE,
    "few tokens": (*FREE[:-1], 3),
    "sampled": (*FREE, *SAMPLED),
    "another seed": (*FREE, *SAMPLED[:3], 8),
    "hot": (*FREE, *HOT),
    "top p": (*FREE, *HOT, "--top-p", "0.6"),
    "top k": (*FREE, *HOT, "--top-k", "5"),
    "min p": (*FREE, *HOT, "--min-p", "0.3"),
    "min p, but some": (*FREE, *HOT, "--min-p", "0.3", "--min-tokens-to-keep", "30"),
    "xtc": (*FREE, *HOT, "--xtc-probability", "0.9"),
    "xtc, lower": (*FREE, *HOT, "--xtc-probability", "0.9", "--xtc-threshold", "0.02"),
    "system prompt": ("-p", QUESTION, "--system-prompt", TEXT, "-m", 12),
    "prefill response": ("-p", TEXT + QUESTION, "--prefill-response", "It is 41", "-m", 12),
    "default template": ("-p", TEXT + QUESTION, "--use-default-chat-template", "-m", 12),
    "template config": ("-p", QUESTION, "-m", 12, "--chat-template-config", '{"enable_thinking": false}'),
    "extra eos": (*FREE, "--extra-eos-token", "Ġof", 4000),
    "extra eos, by number": (*FREE, "--extra-eos-token", 577),
    "prefill steps": ("-p", TEXT + QUESTION, "--prefill-step-size", 17, "-m", 12),
    "8 bits": ("-p", TEXT + QUESTION, "--kv-bits", 8, "--quantized-kv-start", 0, "-m", 20),
    "4 bits": (*FREE, "--kv-bits", 4, "--quantized-kv-start", 0, "--kv-group-size", 32),
    "2 bits": (*FREE, "--kv-bits", 2, "--quantized-kv-start", 0),
    "8 bits, late": (*FREE, "--kv-bits", 8, "--quantized-kv-start", 20),
    "rotating": ("-p", TEXT + QUESTION, "--max-kv-size", 64, "-m", 20),
    "draft": (*FREE, "--draft-model", EMBEDDED, "--num-draft-tokens", 2),
    "no-ops here": (*FREE, "--trust-remote-code", "--quantize-activations"),
}

# What says the same as "plain", as it should.
SAME = ("plain", "4 bits", "8 bits, late", "draft", "no-ops here")
# Flags that another case has, too.
SIMILAR = (
    *("long option", "plain", "few tokens", "another seed", "hot", "min p", "xtc", "template config"),
    *("extra eos, by number", "prefill steps", "2 bits", "8 bits", "8 bits, late", "no-ops here"),
    *("top k", "min p, but some", "xtc, lower"),
)
PLAIN = ("generate", "--verbose", "F")
OFF = (*PLAIN, "--kv-profile", "off")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return float32_model(tmp_path_factory.mktemp("model") / "needle32")


@pytest.fixture(scope="module")
def texts():
    return {}


def say(cli, model, texts, name):
    if name not in texts:
        code, texts[name], err = cli(*OFF, "--model", model, *CASES[name])
        assert (code, err, bool(texts[name].strip())) == (0, "", True)
    return texts[name]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name in SIMILAR)) for name in CASES])
def test_same_text(cli, mlx_lm, model, texts, name):
    assert say(cli, model, texts, name) == mlx_lm("generate", "--model", model, "--verbose", "F", *CASES[name])


@pytest.mark.full
def test_options_change_the_text(cli, model, texts):
    """The comparisons above compare something: each of these says something else than greedy decoding."""
    free = [name for name in CASES if CASES[name][: len(FREE)] == FREE and name not in SAME]
    assert len(free) == 12
    assert len({say(cli, model, texts, name) for name in ("plain", *free)}) == 13, texts
    for name in SAME:
        assert say(cli, model, texts, name) == texts["plain"]


def test_the_repetition_penalty_is_mlx_lms(cli, model, texts):
    """mlx_lm.generate has no flag for it."""
    loaded, tokenizer = load(str(model))
    processors = make_logits_processors(repetition_penalty=1.8, repetition_context_size=9)
    expected = generate(loaded, tokenizer, PROSE, max_tokens=16, logits_processors=processors)
    said = cli(*OFF, "--model", model, *FREE, "--repetition-penalty", "1.8", "--repetition-context-size", 9).out
    assert said == f"{expected}\n" != say(cli, model, texts, "plain")


@pytest.mark.parametrize("name", ["8 bits", "rotating"])
def test_mlx_lms_caches_need_no_profile(cli, model, texts, name):
    assert cli(*PLAIN, "--model", model, *CASES[name])[:2] == (0, say(cli, model, texts, name))


def test_dash_reads_standard_input(cli, mlx_lm):
    words = ("--model", EMBEDDED, "-p", "-", "-m", 12)
    theirs = mlx_lm("generate", "--verbose", "F", *words, stdin=TEXT + QUESTION)
    assert cli(*OFF, *words, stdin=TEXT + QUESTION).out == theirs


def test_template_config_reaches_the_template(cli, mlx_lm, tmp_path):
    loud = "{% if shout %}LOUD AND CLEAR {% endif %}"
    model = copy_model(tmp_path / "model", template=lambda text: loud + text)
    words = ("--model", model, "--verbose", "F", "-p", PROSE, "-m", 12)
    flag = ("--chat-template-config", '{"shout": true}')
    assert cli(*OFF, *words, *flag).out == mlx_lm("generate", *words, *flag)
    longer, shorter = (cli(*OFF, *words, "--json", *more).json["stats"]["prompt_tokens"] for more in (flag, ()))
    assert longer > shorter


def test_prefill_step_size_is_used(cli, model):
    """A prompt that is read in steps sees its earlier steps packed; at 2 bits that shows."""
    words = (*PLAIN, "--model", model, *FREE[:2], TEXT, "-m", 24, *HOT)
    coarse = ("--kv-key", "tq2", "--kv-value", "tq2", "--kv-sinks", 0, "--kv-window", 0, "--kv-normalize", "off")
    assert cli(*words, *coarse, "--prefill-step-size", 16).out != cli(*words, *coarse).out


def test_verbose_text_is_the_text_between_mlx_lms_lines(cli, mlx_lm):
    theirs = mlx_lm("generate", "--model", EMBEDDED, *FREE)
    assert theirs.split("==========\n")[1] == cli("generate", "--kv-profile", "off", *FREE).out


def test_an_answer_that_ends_at_once_is_an_empty_line(cli):
    first = cli("generate", "--json", "--kv-profile", "off", *FREE[:-1], 1)
    assert first.json["stats"]["generation_tokens"] == 1
    assert cli(*PLAIN, "-p", "x", "-m", 5, "--extra-eos-token", *range(4096)) == (0, "\n", "")
