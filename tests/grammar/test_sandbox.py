"""Grammars that would crash or stall the process that compiles them, or fill its memory."""

import asyncio
import json

import psutil
import pytest
from http_harness import wait_for

from mlx_tq.grammar.grammar_source import GrammarError, GrammarSource
from mlx_tq.grammar.sandbox import CompileLimits, GrammarChecker, GrammarLimitError
from mlx_tq.models import load

LOWEST = -(2**63)


def regexes(count, mark=""):
    """Parts of an allOf, each of which doubles the time and memory of compiling it."""
    return [{"type": "string", "pattern": f".*{chr(97 + n)}{n}{mark}.*"} for n in range(count)]


SLOW = {"allOf": [{"allOf": regexes(12, "a")}, {"allOf": regexes(12, "b")}]}


@pytest.fixture(scope="module")
def make_checker():
    tokenizer = load()[1]
    checkers = []

    def make(**limits):
        text = tokenizer._tokenizer.backend_tokenizer.to_str()
        checkers.append(GrammarChecker(text, sorted(tokenizer.eos_token_ids), CompileLimits(**limits)))
        return checkers[-1]

    yield make
    for checker in checkers:
        checker.close()


@pytest.fixture(scope="module")
def checker(make_checker):
    return make_checker()


def check(checker, source):
    """Return the bytes that a compiled grammar retains; raise what is wrong with it."""
    result = asyncio.run(checker.check(source))
    if isinstance(result, GrammarError):
        raise result
    return result


def source_of(schema):
    return GrammarSource.of_schema(schema)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "integer", "minimum": LOWEST, "maximum": LOWEST}, ()),
        ({"minimum": -1e19, "maximum": -1e19}, ()),
        ({"properties": {"a": {"anyOf": [{"exclusiveMaximum": -1e300}]}}}, ("properties", "a", "anyOf", "0")),
        ({"$defs": {"unused": {"maximum": LOWEST + 512}}}, ("$defs", "unused")),
        ({"items": {"const": {"a": [LOWEST]}}}, ("items",)),
        ({"enum": [1, -(10**400)]}, ()),
        ({"not": {"allOf": regexes(17)}}, ("not",)),
    ],
)
def test_fatal_schemas_are_rejected_without_compiling(schema, path):
    with pytest.raises(GrammarError, match=r"must be above -9223372036854775296|the limit is 16") as refused:
        source_of(schema)
    assert refused.value.path == path


def test_values_just_inside_the_limits_are_accepted(checker):
    check(checker, source_of({"type": "integer", "minimum": LOWEST + 1025, "maximum": LOWEST + 1025}))
    check(checker, source_of({"type": "number", "minimum": -1e300, "maximum": -1e300}))
    check(checker, source_of({"allOf": [{"type": "object"}] * 16}))


def test_endless_forced_bytes_do_not_hang(checker):
    check(checker, GrammarSource("lark", "start: T T\nT: /b+/"))
    for options in ('%llguidance {"no_forcing": false}\n', "%llguidance {}\n"):
        with pytest.raises(GrammarError, match="%llguidance"):
            GrammarSource("lark", f"start: T T\nT: /b+/\n{options}")


def test_memory_is_limited(make_checker):
    """Compiling this takes 100 MB."""
    with pytest.raises(GrammarLimitError, match=r"memory"):
        check(make_checker(nbytes=2**25, seconds=60), source_of({"allOf": regexes(16)}))


def test_time_is_limited(make_checker):
    with pytest.raises(GrammarLimitError, match=r"compiling takes more than 0\.5 s"):
        check(make_checker(seconds=0.5), source_of(SLOW))


def test_memory_that_a_compiled_grammar_retains_is_limited(checker):
    assert check(checker, source_of({"type": "object"})) < 2**23
    with pytest.raises(GrammarLimitError, match="100 MB of memory when compiled"):
        check(checker, GrammarSource("regex", "a?" * 10_000))


@pytest.mark.parametrize(
    "source",
    [
        GrammarSource("regex", "a{60000}"),
        source_of({"type": "array", "items": {"const": 1}, "minItems": 9000}),
        source_of({"enum": ["a" * 60_000]}),
    ],
    ids=lambda source: source.text[:40],
)
def test_grammars_with_slow_masks_are_refused(checker, source):
    """Forced bytes are followed to their end for each mask."""
    with pytest.raises(GrammarLimitError, match=r"32 token masks takes more than 0\.25 s"):
        check(checker, source)


def test_locating_an_error_is_time_limited(checker):
    """Each of 900 properties is compiled with all 500 definitions."""
    wide = {"properties": {f"p{n}": {"type": "string"} for n in range(900)}, "not": {}}
    wide["$defs"] = {f"d{n}": {"type": "string"} for n in range(500)}
    with pytest.raises(GrammarError, match="not"):
        check(checker, source_of(wide))


def workers(checker):
    return psutil.Process(checker.pid).children()


def kill_fork_server(checker):
    process = psutil.Process(checker.pid)
    process.kill()
    wait_for(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


async def start_slow_check(checker):
    """Return the task of a check whose worker runs."""
    assert not workers(checker)
    slow = asyncio.create_task(checker.check(source_of(SLOW)))
    while not workers(checker):
        await asyncio.sleep(0.01)
    return slow


def test_a_killed_worker_fails_only_its_check(checker):
    wait_for(lambda: not workers(checker))

    async def main():
        slow = await start_slow_check(checker)
        workers(checker)[0].kill()
        with pytest.raises(GrammarLimitError, match="crashed"):
            await slow
        assert isinstance(await checker.check(source_of({"type": "object"})), int)

    asyncio.run(main())


def test_a_cancelled_check_ends_its_worker(checker):
    wait_for(lambda: not workers(checker))

    async def main():
        (await start_slow_check(checker)).cancel()

    asyncio.run(main())
    wait_for(lambda: not workers(checker), timeout=2)


def test_a_dead_fork_server_is_restarted(checker):
    kill_fork_server(checker)
    check(checker, source_of({"type": "object"}))


def test_the_fork_server_does_not_inherit_secrets(checker, monkeypatch):
    monkeypatch.setenv("MLX_TQ_API_KEY", "of-the-server")
    kill_fork_server(checker)
    check(checker, source_of({"type": "object"}))
    assert "of-the-server" not in json.dumps(psutil.Process(checker.pid).environ())
