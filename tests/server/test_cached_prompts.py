"""Prompts that share a prefix with earlier ones are prefilled from there on, also by a server on the same folder."""

import pytest

from mlx_tq.prefix_cache.folder import Folder

from .conftest import question
from .harness import together


def counts(answer):
    return answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens


def text_of(answer):
    return answer.choices[0].message.content


def is_nearly_cached(answer):
    length, cached = counts(answer)
    return length - 32 <= cached < length


def stream_usage(server, text):
    """Return the last chunk of a streamed answer, which has the usage."""
    return list(server.chat(text, stream=True, stream_options={"include_usage": True}))[-1]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("prefixes") / "store"


@pytest.fixture(scope="module")
def start_on_disk(start, path):
    return lambda key="one": start("--prefill-step-size", "64", "--prefix-cache", path, key=key)


@pytest.fixture(scope="module")
def pair(start_on_disk):
    """Start two servers with one prefix cache on disk."""
    return start_on_disk(), start_on_disk()


@pytest.fixture(scope="module")
def fresh(pair):
    """Return a server that continues from its memory, as long as the other one has written nothing."""
    return pair[0]


def test_a_conversation_continues_from_its_cache(fresh):
    text = question(12, 593_847)
    first = fresh.chat(text)
    length, cached = counts(first)
    assert (cached, length > 200) == (0, True)
    reply = text_of(first)
    assert reply == "593847"
    turn = ({"role": "user", "content": text}, {"role": "assistant", "content": reply})
    second = fresh.chat(*turn, {"role": "user", "content": "What is the access code?"})
    longer, cached = counts(second)
    assert cached == length + len(reply) + 1  # a digit is a token, and so is the end of the turn
    assert longer > cached
    assert text_of(second) == reply


def test_a_repeated_prompt_and_one_that_shares_its_start(fresh):
    text = question(10, 274_650)
    answers = [fresh.chat(text) for _ in range(2)]
    assert {text_of(answer) for answer in answers} == {"274650"}
    (length, before), (_, after) = map(counts, answers)
    assert before < after == length - 1
    length, cached = counts(stream_usage(fresh, text))
    assert cached == length - 1
    metrics = fresh.metrics()
    assert 0 < metrics["mlx_tq_prompt_cache_entries"] <= 10
    assert metrics["mlx_tq_prompt_cache_bytes"] > 0
    assert metrics["mlx_tq_cached_tokens_total"] > 0 == metrics["mlx_tq_restored_tokens_total"]
    other = fresh.chat(text.replace("What is", "Which is"))
    length, cached = counts(other)
    assert length - 20 < cached < length
    assert text_of(other) == "274650"


def test_a_generated_prompt_is_cached_except_for_its_last_token(fresh, loaded):
    """The cache holds exactly the prompt, but its last token must be prefilled."""
    ids, (nine,) = loaded[1].encode("The river"), loaded[1].encode("9")
    nines = {"model": "needle32", "prompt": ids, "max_tokens": 6, "logit_bias": {str(nine): 100}}
    assert fresh.openai.completions.create(**nines).choices[0].text == "9" * 6
    prompt = ids + [nine] * 6
    again = fresh.openai.completions.create(model="needle32", prompt=prompt, max_tokens=2)
    assert counts(again) == (len(prompt), len(prompt) - 1)


# Two servers with one prefix cache on disk.


def test_another_server_restores_prompts_and_answers_the_same(pair, server):
    first, second = pair
    texts = [question(count, 100_000 + count) for count in (12, 14, 16)]
    plain = [text_of(server.chat(text)) for text in texts]
    fresh = together([lambda text=text: first.chat(text) for text in texts])
    again = together([lambda text=text: second.chat(text) for text in texts])
    assert [text_of(answer) for answer in fresh] == plain
    assert [text_of(answer) for answer in again] == plain
    for answer in again:
        assert is_nearly_cached(answer)
    longer = question(18, 593_847)
    first.chat(longer)
    streamed = stream_usage(second, longer)
    assert is_nearly_cached(streamed)
    prompt_tokens, restored = map(sum, zip(*map(counts, [*again, streamed]), strict=True))
    metrics = second.metrics()
    assert metrics["mlx_tq_restored_tokens_total"] == metrics["mlx_tq_cached_tokens_total"] == restored
    assert metrics["mlx_tq_prefill_tokens_total"] == prompt_tokens - restored


@pytest.mark.full
def test_two_servers_write_at_once(pair, server):
    """A server that finds the folder in use stores later or not at all, and delays no answer."""
    texts = [f"Page {number}.\n{question(number, 500_000 + number)}" for number in (11, 13)]
    calls = [lambda server=server, text=text: server.chat(text) for server in pair for text in texts]
    answers = together(calls)
    plain = [text_of(server.chat(text)) for text in texts]
    assert [text_of(answer) for answer in answers] == 2 * plain
    for one in pair:
        assert "Traceback" not in one.log()
        assert "WARNING" not in one.log()


def test_a_session_restores_the_prompt_of_another_servers_session(pair):
    options = {"extra_headers": {"X-MLX-TQ-Session": "a"}, "max_tokens": 12}
    text = "Weights and coins.\n" + question(13, 274_650)
    fresh, again = (server.chat(text, **options) for server in pair)
    assert counts(fresh)[1] < 64
    assert is_nearly_cached(again)
    reply = text_of(again)
    assert reply == text_of(fresh) == "274650"
    turn = ({"role": "user", "content": text}, {"role": "assistant", "content": reply})
    later = pair[1].chat(*turn, "What is the access code?", **options)
    assert text_of(later) == reply


@pytest.mark.full
def test_another_key_restores_nothing_and_stores_its_own(pair, path, start_on_disk):
    """If records of another key were reused, the time to store would tell that they exist."""
    text = f"Keys.\n{question(15, 118_822)}"
    before = len(Folder(path).records())
    content = text_of(pair[0].chat(text))
    middle = len(Folder(path).records())
    answer = start_on_disk("two").chat(text)
    assert counts(answer)[1] == 0
    assert text_of(answer) == content == "118822"
    # The first key may have stored the common beginning of all prompts before; the other key stores that, too.
    assert len(Folder(path).records()) - middle >= middle - before > 0
