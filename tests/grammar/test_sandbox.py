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
source_of = GrammarSource.of_schema


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
    assert check(checker, source_of({"allOf": [{"type": "object"}] * 16})) < 2**23


def test_endless_forced_bytes_do_not_hang(checker):
    check(checker, GrammarSource("lark", "start: T T\nT: /b+/"))
    for options in ('%llguidance {"no_forcing": false}\n', "%llguidance {}\n"):
        with pytest.raises(GrammarError, match="%llguidance"):
            GrammarSource("lark", f"start: T T\nT: /b+/\n{options}")


SLOW_MASKS = r"32 token masks takes more than 0\.25 s"  # forced bytes are followed to their end for each mask


@pytest.mark.parametrize(
    ("limits", "source", "message"),
    [
        pytest.param(  # compiling takes 50 MB
            *({"nbytes": 2**25, "seconds": 60}, source_of({"allOf": regexes(15)}), "memory"), marks=pytest.mark.full
        ),
        ({"seconds": 0.5}, source_of(SLOW), r"compiling takes more than 0\.5 s"),
        ({}, GrammarSource("regex", "a?" * 10_000), "100 MB of memory when compiled"),
        ({}, GrammarSource("regex", "a{60000}"), SLOW_MASKS),
        *(
            pytest.param({}, source_of(schema), SLOW_MASKS, marks=pytest.mark.full)
            for schema in (
                {"type": "array", "items": {"const": 1}, "minItems": 9000},
                {"enum": ["a" * 60_000]},
            )
        ),
    ],
    ids=["memory", "time", "retained memory", "regex", "array", "enum"],
)
def test_expensive_grammars_are_refused(checker, make_checker, limits, source, message):
    with pytest.raises(GrammarLimitError, match=message):
        check(make_checker(**limits) if limits else checker, source)


def test_locating_an_error_is_time_limited(checker):
    """Each of 900 properties is compiled with all 500 definitions."""
    wide = {"properties": {f"p{n}": {"type": "string"} for n in range(900)}, "not": {}}
    wide["$defs"] = {f"d{n}": {"type": "string"} for n in range(500)}
    with pytest.raises(GrammarError, match="not"):
        check(checker, source_of(wide))


def test_a_killed_worker_fails_only_its_check_and_a_cancelled_one_ends(checker):
    fork_server = psutil.Process(checker.process.pid)
    wait_for(lambda: not fork_server.children())

    async def start_slow_check():
        """Return the task of a check whose worker runs."""
        slow = asyncio.create_task(checker.check(source_of(SLOW)))
        while not fork_server.children():
            await asyncio.sleep(0.01)
        return slow

    async def main():
        slow = await start_slow_check()
        fork_server.children()[0].kill()
        with pytest.raises(GrammarLimitError, match="crashed"):
            await slow
        assert isinstance(await checker.check(source_of({"type": "object"})), int)
        wait_for(lambda: not fork_server.children())
        (await start_slow_check()).cancel()

    asyncio.run(main())
    wait_for(lambda: not fork_server.children(), timeout=2)


def test_a_dead_fork_server_is_restarted_without_secrets(checker, monkeypatch):
    monkeypatch.setenv("MLX_TQ_API_KEY", "of-the-server")
    process = psutil.Process(checker.process.pid)
    process.kill()
    wait_for(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    check(checker, source_of({"type": "object"}))
    assert checker.process.pid != process.pid
    assert "of-the-server" not in json.dumps(psutil.Process(checker.process.pid).environ())
