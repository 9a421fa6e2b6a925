"""Ctrl-C and readers that leave: real processes, real signals."""

import argparse
import io
import json
import os
import signal
from contextlib import suppress

import pytest
from processes import LIMIT, read_until

from mlx_tq.cli.runner import run_command

from .tools import PACKED, facts

# Goes on until the model's positions end.
STORY = ("--ignore-chat-template", "-p", "The history of the city", "-m", 3000, "--temp", "1", "--seed", "5")


@pytest.mark.full
def test_in_generation_the_text_is_kept(start):
    process = start("generate", *STORY, *PACKED)
    text = read_until(process.stdout.fileno(), " ")
    process.send_signal(signal.SIGINT)
    rest, err = (part.decode(errors="replace") for part in process.communicate(timeout=LIMIT))
    text += rest
    assert process.returncode == 130
    assert text.strip()
    assert text.endswith("\n")
    assert "Traceback" not in err
    assert 0 < int(err.split("generation: ")[1].split(" tokens")[0].replace(",", "")) < 3000
    for words in ("tok/s (interrupted)", "KV cache: ", "peak memory: "):
        assert words in err


@pytest.mark.full
@pytest.mark.parametrize(
    "json_flag", [pytest.param((), id="text"), pytest.param(("--json",), id="json", marks=pytest.mark.full)]
)
def test_in_prefill(start, json_flag):
    words = ("generate", "-p", "".join(facts(180)), *PACKED, "--prefill-step-size", 16, *json_flag)
    terminal, other_end = os.openpty()
    process = start(*words, stderr=other_end)
    os.close(other_end)
    said = read_until(terminal, "tok/s")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=LIMIT)
    with suppress(OSError):  # a terminal whose program ended
        while more := os.read(terminal, 65536):
            said += more.decode(errors="replace")
    os.close(terminal)
    assert (process.returncode, "Traceback" in said) == (130, False)
    assert "Prefilling" in said
    if json_flag:
        answer = json.loads(out)
        stats = answer["stats"]
        assert (answer["text"], stats["finish_reason"], stats["generation_tokens"]) == ("", "interrupted", 0)
    else:
        assert out == b"\n"
        assert "interrupted before the first token" in said
        assert "peak memory" in said


@pytest.mark.full
def test_while_caching_a_prompt(start, tmp_path):
    text, _ = facts(180)
    file = tmp_path / "cache.safetensors"
    process = start("cache_prompt", "-p", text, "--prompt-cache-file", file, "--prefill-step-size", 16)
    read_until(process.stderr.fileno(), "Full precision")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_while_waiting_for_standard_input(cli):
    class Terminal(io.StringIO):
        def read(self, *_):
            raise KeyboardInterrupt

    assert cli("generate", "-p", "-", stdin=Terminal()) == (130, "", "")


def complains(err):
    return any(word in err for word in (b"Traceback", b"Exception", b"Broken"))


@pytest.mark.full
@pytest.mark.parametrize("words", [("--version",), ("generate", "-p", "hi")])
def test_nobody_reads(start, words):
    """`mlx_tq ... | true` is no reason for a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    process = start(*words, stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=LIMIT)
    assert not complains(err)
    assert process.returncode in (0, 1)  # argparse does not mind that nobody reads its help


@pytest.mark.full
def test_reader_leaves(start):
    """`mlx_tq.generate ... | head -c 10`."""
    process = start("generate", *STORY)
    read_until(process.stdout.fileno(), " ")
    process.stdout.close()
    with process.stderr as stream:
        assert not complains(stream.read())
    assert process.wait(timeout=LIMIT) == 1


@pytest.fixture
def default_signals():
    """Give SIGTERM and SIGHUP their default action, as a shell does."""
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield list(handlers)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("repeat_s", [0, 60])
def test_a_signal_that_a_finalizer_swallows_can_be_sent_again(monkeypatch, default_signals, number, repeat_s):
    """One soon after the first is ignored: a shell and its terminal both send SIGHUP."""
    monkeypatch.setattr("mlx_tq.cli.runner.REPEAT_S", repeat_s)

    class Finalized:
        def __del__(self):
            signal.raise_signal(number)

    def run(args):
        finalized = Finalized()
        del finalized
        signal.raise_signal(number)
        return 0

    try:
        code = run_command(argparse.ArgumentParser("mlx_tq.test"), run, [])
    except SystemExit as exit_:
        code = exit_.code
    assert code == (0 if repeat_s else 128 + number)
    assert [signal.getsignal(number) for number in default_signals] == [signal.SIG_DFL] * 2


def test_a_handler_that_python_cannot_restore_stays(monkeypatch):
    """`getsignal` returns None for one that C installed."""
    monkeypatch.setattr(signal, "getsignal", lambda _: None)
    monkeypatch.setattr(signal, "signal", lambda *_: pytest.fail("it was replaced"))
    assert run_command(argparse.ArgumentParser("mlx_tq.test"), lambda _: 0, []) == 0
